"""Compares two checkpoints of any formats and shardings: tensors element by element, everything else by value."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import has_numpy, raw, require_numpy, tensor_blocks, values
from mmfsdp.checkpoint.files.expecting import compared_extents
from mmfsdp.checkpoint.files.writing import Progress, Tracker
from mmfsdp.checkpoint.formats.registry import opened
from mmfsdp.checkpoint.geometry import check_coverage, without_repeats
from mmfsdp.checkpoint.layout import Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.tree import leaves, part_tensors, weights_of
from mmfsdp.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DiffReport", "Difference", "ValueDifference", "diff"]

_ELEMENTS = 1 << 19  # per block


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the elements of a tensor differ."""

    name: str
    """The tensor."""
    elements: int
    """Number of elements."""
    differing: int | None
    """Number of elements that differ by more than is tolerated; ``None`` without numpy, which counts them."""
    max_abs: float | None
    """Largest absolute difference among those; ``None`` without numpy, or where only NaNs differ."""
    max_rel: float | None
    """Largest difference relative to the element of the second tensor, likewise."""


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

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        found = (self.only_in_a, self.only_in_b, self.shapes, self.dtypes, self.values, self.other)
        return not any(found)

    def describe(self) -> dict[str, Any]:
        """Return what ``diff --json`` prints: plain values only; infinities are the string ``'inf'``."""
        content = {"same": self.same, **asdict(self)}
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
    ignore_dtypes: bool = False,
    trust: bool = False,
    progress: Progress | None = None,
    reference: str | os.PathLike[str] | Layout | None = None,
) -> DiffReport:
    """Compare the tensors of two checkpoints of any formats and shardings.

    Args:
        a: A checkpoint that ``open_layout`` reads, or what it returned.
        b: The other.
        rtol: Relative tolerance: elements are equal if ``abs(a - b) <= atol + rtol * abs(b)``. Without any tolerance
            they are equal if their bits are. Needs numpy.
        atol: Absolute tolerance.
        keep: What to compare: ``'model'``, ``'all'`` or a top-level key. By default all, or the weights alone where
            one of the two is a bare state dict, such as a safetensors file.
        ignore_dtypes: Compare values of different dtypes as numbers instead of reporting the dtypes. Needs numpy.
        trust: Accept pickled objects that are not on the list of safe names. They are not imported even then.
        progress: Called with the elements compared so far and the elements to compare.
        reference: A whole checkpoint of the same model, where one of them does not say all shapes; see ``open_layout``.

    Raises:
        ConfigError: A tolerance is negative, or numpy is needed and not there, or ``keep`` is unknown.
        CheckpointNotFoundError, FormatError, UnsafePickleError: One of them cannot be opened; see ``open_layout``.
        IncompleteCheckpointError, CorruptCheckpointError: One of them lacks data.
    """
    if not (rtol >= 0 and atol >= 0):
        raise ConfigError(f"A tolerance cannot be negative, got rtol={rtol} and atol={atol}.")
    if rtol or atol or ignore_dtypes:
        require_numpy("Comparing numbers instead of bytes")
    began = time.perf_counter()
    one, two = (opened(given, trust=trust, reference=reference) for given in (a, b))
    scope = _common_scope(one, two) if keep is None else keep
    ours, theirs = part_tensors(one, scope), part_tensors(two, scope)
    shared = [name for name in ours if name in theirs]
    shapes = tuple(
        Difference(name, list(ours[name].shape), list(theirs[name].shape))
        for name in shared
        if ours[name].shape != theirs[name].shape
    )
    dtypes = tuple(
        Difference(name, ours[name].dtype, theirs[name].dtype)
        for name in shared
        if ours[name].dtype != theirs[name].dtype and not ignore_dtypes
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
        _compared(pairs, rtol, atol, progress),
        _others(one, two) if scope == "all" and not one.is_flat and not two.is_flat else (),
        (*_left_out("a", one, scope), *_left_out("b", two, scope)),
        time.perf_counter() - began,
    )


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
    pairs: Mapping[str, tuple[TensorEntry, TensorEntry]], rtol: float, atol: float, progress: Progress | None
) -> tuple[ValueDifference, ...]:
    advance = Tracker(sum(entry.numel for entry, _ in pairs.values()), progress).advance
    with OpenFiles() as files:
        files.expect(compared_extents(pairs.values()))
        found = (
            compare_tensors(files, name, one, two, rtol=rtol, atol=atol, advance=advance)
            for name, (one, two) in pairs.items()
        )
        return tuple(item for item in found if item is not None)


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


def compare_tensors(
    files: OpenFiles,
    name: str,
    one: TensorEntry,
    two: TensorEntry,
    *,
    rtol: float,
    atol: float,
    advance: Callable[[int], None],
) -> ValueDifference | None:
    """Return how two tensors of the same shape differ, or ``None`` if they do not.

    Without tolerance and with one dtype, elements are equal if their bits are. Otherwise they are equal if
    ``abs(a - b) <= atol + rtol * abs(b)``, or if both are NaN.

    Args:
        files: The open files to read with.
        name: What to call the tensor.
        one: The first.
        two: The second; it may be of another dtype.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        advance: Called with the number of elements after each block.
    """
    elements = one.numel
    [one, two], times = without_repeats(one, two)
    differing, largest, relative, counted = 0, -1.0, -1.0, True
    blocks = zip(
        tensor_blocks(files, one, _ELEMENTS * itemsize(one.dtype)),
        tensor_blocks(files, two, _ELEMENTS * itemsize(two.dtype)),
        strict=True,
    )
    for a, b in blocks:
        if one.dtype != two.dtype or a != b:
            if one.dtype == two.dtype and not has_numpy():
                differing, counted = 1, False
                break
            count, absolute, ratio = _differences(a, b, one.dtype, two.dtype, rtol, atol)
            differing, largest, relative = differing + count, max(largest, absolute), max(relative, ratio)
        advance(len(a) // itemsize(one.dtype) * times)
    if not differing:
        return None
    known = counted and largest >= 0
    return ValueDifference(
        name,
        elements,
        differing * times if counted else None,
        largest if known else None,
        relative if known and relative >= 0 else None,
    )


def _differences(
    a: memoryview, b: memoryview, a_dtype: str, b_dtype: str, rtol: float, atol: float
) -> tuple[int, float, float]:
    import numpy as np

    x, y = values(a, a_dtype), values(b, b_dtype)
    exact = a_dtype == b_dtype
    if exact:
        unequal = raw(a, a_dtype) != raw(b, b_dtype)
        where = np.flatnonzero(unequal.any(axis=1) if unequal.ndim == 2 else unequal)
        x, y = x[where], y[where]
    distance, scale = _distance(x, y)
    if not exact or rtol or atol:
        with np.errstate(all="ignore"):
            within = np.isfinite(distance) & (distance <= atol + rtol * scale)
            close = within | (x == y) | (_nan(x) & _nan(y))
        distance, scale = distance[~close], scale[~close]
    known = ~np.isnan(distance)
    distance, scale = distance[known], scale[known]
    count = len(known)
    with np.errstate(all="ignore"):
        ratio = distance / scale
    ratio = ratio[~np.isnan(ratio)]
    return count, float(distance.max(initial=-1.0)), float(ratio.max(initial=-1.0))


def _distance(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``abs(x - y)`` and ``abs(y)`` as float64, exact for integers before they are rounded."""
    import numpy as np

    if x.dtype == y.dtype and x.dtype.kind in "iu":
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        with np.errstate(all="ignore"):
            gap = np.where(x > y, x - y, y - x).astype(x.dtype).view(unsigned)
        return gap.astype(np.float64), np.abs(y.astype(np.float64))
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        return np.abs(x.astype(wide) - y.astype(wide)), np.abs(y.astype(wide))


def _nan(x: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    return np.isnan(x) if x.dtype.kind in "fc" else np.zeros(len(x), bool)
