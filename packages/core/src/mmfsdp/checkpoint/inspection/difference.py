"""Compares two checkpoints of any formats and shardings: tensors element by element, everything else by value."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.codes import scales_of
from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.dequantizing import restore_codes
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import require_numpy
from mmfsdp.checkpoint.files.expected_reads import compared_extents
from mmfsdp.checkpoint.files.planned_files import Progress, Tracker
from mmfsdp.checkpoint.formats.opening import opened
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.inspection.comparing import ValueDifference, compare_tensors
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.state_keys import in_one_form
from mmfsdp.checkpoint.tree import common_prefix, leaves, part_tensors, weights_of
from mmfsdp.errors import ConfigError, FormatError, closest

__all__ = ["DiffReport", "Difference", "ValueDifference", "diff"]

_MOST_JOBS = 4  # more hardly help, because memory is the limit


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or value that differs between two checkpoints."""

    name: str
    """The tensor, or the path of the value."""
    a: Any
    """Its shape, dtype or value in the first checkpoint."""
    b: Any
    """Its shape, dtype or value in the second checkpoint."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two checkpoints differ."""

    a: str
    """The first."""
    b: str
    """The second."""
    scope: str
    """The part that was compared: ``'all'``, ``'model'`` or a top-level key."""
    compared: int
    """Number of tensors whose values were compared."""
    only_in_a: tuple[str, ...]
    """Tensors that only the first has."""
    only_in_b: tuple[str, ...]
    """Tensors that only the second has."""
    shapes: tuple[Difference, ...]
    """Tensors of different shapes; their values are not compared."""
    dtypes: tuple[Difference, ...]
    """Tensors of different dtypes; their values are compared only if dtypes are ignored, and then none is listed."""
    values: tuple[ValueDifference, ...]
    """Tensors whose elements differ by more than is tolerated."""
    other: tuple[Difference, ...]
    """Content that is not a tensor and differs; compared where both checkpoints are compared as a whole."""
    left_out: tuple[str, ...]
    """Top-level keys of either that were not compared, such as ``'a: optimizer'``."""
    seconds: float
    """Wall time."""
    prefix: str = ""
    """A prefix without which most names would match, if less than half do; empty if there is none."""
    elements: Mapping[str, int] = field(default_factory=dict)
    """Number of elements of each tensor whose values were compared."""
    quantized: bool = False
    """Whether one has weights as 8-bit codes with scales that the other lacks; ``dequantize`` compares them."""

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        found = (self.only_in_a, self.only_in_b, self.shapes, self.dtypes, self.values, self.other)
        return not any(found)

    @property
    def num_tensors(self) -> int:
        """Number of tensors that either has, in the part that was compared; one that both have counts once."""
        return self.compared + len(self._unlike) + len(self.only_in_a) + len(self.only_in_b)

    @property
    def num_differing(self) -> int:
        """Number of tensors of `num_tensors` that differ: only one has them, or shapes, dtypes or values differ."""
        return self.num_tensors - self.compared + len(self.values)

    @property
    def _unlike(self) -> set[str]:
        return {item.name for item in (*self.shapes, *self.dtypes)}

    def describe(self) -> dict[str, Any]:
        """Return what ``diff --json`` prints: plain values only; infinities are the string ``'inf'``."""
        counts = {"num_tensors": self.num_tensors, "num_differing": self.num_differing}
        content = {"same": self.same, **counts, **asdict(self)}
        del content["elements"]
        for item in content["values"]:
            for key in ("max_abs", "max_rel"):
                item[key] = "inf" if item[key] == math.inf else item[key]
        content["other"] = [{"name": item.name, "a": repr(item.a), "b": repr(item.b)} for item in self.other]
        return content


def diff(
    a: str | os.PathLike[str] | Layout,
    b: str | os.PathLike[str] | Layout,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    keep: str | None = None,
    strip_prefix: str | None = None,
    ignore_dtypes: bool = False,
    dequantize: bool = False,
    trust: bool = False,
    progress: Progress | None = None,
    reference: str | os.PathLike[str] | Layout | None = None,
    jobs: int | None = None,
    histogram: bool = False,
) -> DiffReport:
    """Compare the tensors of two checkpoints of any formats and shardings.

    An optimizer's state by position and one by name are compared by name.

    Args:
        a: A checkpoint that ``open_layout`` reads, or the layout that it returned.
        b: The other.
        rtol: Relative tolerance: elements are equal if ``abs(a - b) <= atol + rtol * abs(b)``. Without any tolerance
            they are equal if their bits are. Needs numpy.
        atol: Absolute tolerance.
        keep: What to compare: ``'model'``, ``'all'`` or a top-level key. By default all, or the weights alone where
            one of the two is a bare state dict, such as a safetensors file.
        strip_prefix: Remove this prefix from the names of either that have it, such as ``'module.'``.
        ignore_dtypes: Compare values of different dtypes as numbers instead of reporting the dtypes. Needs numpy.
        dequantize: Compare weights that are stored as 8-bit codes with scales as the numbers that they stand for,
            whatever their dtypes. Needs numpy.
        trust: Accept pickled objects that are not on the list of safe names. They are not imported even then.
        progress: Called with the elements compared so far and the elements to compare.
        reference: A whole checkpoint of the same model, where one of them does not say all shapes; see ``open_layout``.
        jobs: Threads that compare; by default one per processor, four at most.
        histogram: Count the differences of each tensor by their size, for `diff_page`. Needs numpy.

    Raises:
        ConfigError: A tolerance is negative or NaN, or numpy is needed and not there, or ``keep`` is unknown, or no
            name has the prefix.
        CheckpointNotFoundError, FormatError, UnsafePickleError: One of them cannot be opened; see ``open_layout``.
        IncompleteCheckpointError, CorruptCheckpointError: One of them lacks data.
    """
    if not (rtol >= 0 and atol >= 0):
        raise ConfigError(
            f"{argument('rtol')} and {argument('atol')} must be numbers of at least 0, got {rtol} and {atol}."
        )
    if rtol or atol or ignore_dtypes or histogram:
        require_numpy("Comparing numbers instead of bytes")
    began = time.perf_counter()
    one, two = in_one_form(*(opened(given, trust=trust, reference=reference) for given in (a, b)))
    if dequantize:
        one, two = restore_codes([one, two], required=True)
    scope = _common_scope(one, two) if keep is None else keep
    ours, theirs = part_tensors(one, scope), part_tensors(two, scope)
    if strip_prefix:
        ours, theirs = _stripped(strip_prefix, ours, theirs)
    shared = [name for name in ours if name in theirs]
    shapes = tuple(
        Difference(name, list(ours[name].shape), list(theirs[name].shape))
        for name in shared
        if ours[name].shape != theirs[name].shape
    )
    dtypes = tuple(
        Difference(name, ours[name].dtype, theirs[name].dtype)
        for name in shared
        if ours[name].dtype != theirs[name].dtype
        and not ignore_dtypes
        and not any(side[name].is_computed for side in ((ours, theirs) if dequantize else ()))
    )
    unlike = {item.name for item in (*shapes, *dtypes)}
    pairs = {name: (ours[name], theirs[name]) for name in shared if name not in unlike}
    check_coverage(one, [entry.name for entry, _ in pairs.values()])
    check_coverage(two, [entry.name for _, entry in pairs.values()])
    return DiffReport(
        str(one.path),
        str(two.path),
        scope,
        len(pairs),
        tuple(name for name in ours if name not in theirs),
        tuple(name for name in theirs if name not in ours),
        shapes,
        dtypes,
        _compared(pairs, rtol, atol, progress, jobs or min(_MOST_JOBS, os.cpu_count() or 1), histogram),
        _others(one, two) if scope == "all" and not one.is_flat and not two.is_flat else (),
        (*_left_out("a", one, scope), *_left_out("b", two, scope)),
        time.perf_counter() - began,
        _prefix(ours, theirs) if 2 * len(shared) < min(len(ours), len(theirs)) else "",
        {name: entry.numel for name, (entry, _) in pairs.items()},
        bool({*scales_of(ours).values()} ^ {*scales_of(theirs).values()}),
    )


def _stripped(prefix: str, *sides: Mapping[str, TensorEntry]) -> list[dict[str, TensorEntry]]:
    if not any(name.startswith(prefix) for side in sides for name in side):
        hint = closest(prefix, {name[: len(prefix)] for side in sides for name in side})
        raise ConfigError(f"{argument('strip_prefix', prefix)} is the beginning of no name in either checkpoint.{hint}")
    found = [{name.removeprefix(prefix): entry for name, entry in side.items()} for side in sides]
    for side, renamed in zip(sides, found, strict=True):
        if len(renamed) < len(side):
            twice = next(name for name in side if name.startswith(prefix) and name.removeprefix(prefix) in side)
            raise ConfigError(f"Without {prefix!r} the name {twice!r} would be that of another tensor.")
    return found


def _prefix(ours: Mapping[str, TensorEntry], theirs: Mapping[str, TensorEntry]) -> str:
    return common_prefix(ours, theirs) or common_prefix(theirs, ours)


def _common_scope(one: Layout, two: Layout) -> str:
    if one.is_flat and two.is_flat:
        return "all"
    try:
        ours, theirs = weights_of(one), weights_of(two)
    except FormatError:
        return "model" if one.is_flat or two.is_flat else "all"
    return "all" if ours.where == theirs.where and one.is_flat == two.is_flat else "model"


def _left_out(side: str, layout: Layout, scope: str) -> tuple[str, ...]:
    if scope == "all" or layout.is_flat:
        return ()
    left = weights_of(layout).left_out() if scope == "model" else [key for key in layout.top_level if key != scope]
    return tuple(f"{side}: {key}" for key in left)


def _compared(
    pairs: Mapping[str, tuple[TensorEntry, TensorEntry]],
    rtol: float,
    atol: float,
    progress: Progress | None,
    jobs: int,
    histogram: bool,
) -> tuple[ValueDifference, ...]:
    tracker = Tracker(sum(entry.numel for entry, _ in pairs.values()), progress)
    idle: SimpleQueue[OpenFiles] = SimpleQueue()

    def compared(name: str, one: TensorEntry, two: TensorEntry) -> ValueDifference | None:
        files = idle.get()
        try:
            return compare_tensors(
                files, name, one, two, rtol=rtol, atol=atol, advance=tracker.advance, histogram=histogram
            )
        except BaseException as error:
            tracker.stop(error)
            raise
        finally:
            idle.put(files)

    # A server is asked for what one thread will read, in its order; many threads ask it.
    remote = any(is_remote(chunk.file) for pair in pairs.values() for one in pair for chunk in one.chunks())
    jobs = 1 if remote else jobs
    with ExitStack() as stack:
        for _ in range(jobs):
            files = stack.enter_context(OpenFiles())
            if remote:
                files.expect(compared_extents(pairs.values()))
            idle.put(files)
        pool = stack.enter_context(ThreadPoolExecutor(jobs, thread_name_prefix="mmfsdp-diff"))
        with tracker.stopping(pool):
            done = [pool.submit(compared, name, one, two) for name, (one, two) in pairs.items()]
            return tuple(item for item in (one.result() for one in done) if item is not None)


class _Missing:
    def __repr__(self) -> str:
        return "(nothing)"


def _others(one: Layout, two: Layout) -> tuple[Difference, ...]:
    ours, theirs = _plain(one), _plain(two)
    missing = _Missing()
    found = []
    for path in {**ours, **theirs}:
        left, right = ours.get(path, missing), theirs.get(path, missing)
        # Classes that pickles name are made anew for each file: only their names can be compared.
        same = type(left) is type(right) and left == right if not isinstance(left, type) else repr(left) == repr(right)
        if not same and not (left != left and right != right):
            found.append(Difference(path, left, right))
    return tuple(found)


def _plain(layout: Layout) -> dict[str, Any]:
    return {path: leaf for path, leaf in leaves(layout.tree) if not isinstance(leaf, TensorRef)}
