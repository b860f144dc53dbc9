"""Writes what changed between two checkpoints, and applies it to the first to get the second, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.arithmetic.bit_sums import BitSum, GivenBytes, unsigned
from mmfsdp.checkpoint.arithmetic.matching import for_weights, refuse_settings
from mmfsdp.checkpoint.conversion.converting import ConversionReport, convert
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles, changed, identity
from mmfsdp.checkpoint.files.elements import equal_bytes, require_numpy, tensor_blocks
from mmfsdp.checkpoint.files.expected_reads import compared_extents
from mmfsdp.checkpoint.files.planned_files import Progress
from mmfsdp.checkpoint.formats.opening import opened
from mmfsdp.checkpoint.geometry import check_coverage
from mmfsdp.checkpoint.integrity import crc32, parse_json
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import part_tensors, weights_of
from mmfsdp.errors import ConfigError, CorruptCheckpointError, FormatError

__all__ = ["apply_delta", "checkpoint_delta"]

_TABLE = "mmfsdp.delta"
"""The tensor of bytes that says what a delta holds, as JSON: ``version`` 1, and ``tensors``, which maps each name of
the second checkpoint to its ``kind`` (``equal``, ``difference`` or ``whole``), its ``dtype`` and, unless it is whole,
the ``crc32`` of the first checkpoint's tensor, packed."""

_NAMES = ("include", "exclude", "rename", "strip_prefix", "dtype", "quantize", "recipe")
_LIMIT = 1 << 30  # bytes of a table


def checkpoint_delta(
    a: str | os.PathLike[str] | Layout,
    b: str | os.PathLike[str] | Layout,
    target: str | os.PathLike[str],
    conversion: Conversion | None = None,
    *,
    reference: str | os.PathLike[str] | Layout | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> ConversionReport:
    """Write the difference between the weights of two checkpoints, from which `apply_delta` restores the second.

    It is exact for every dtype and value. Of a tensor that changed, the difference of the bit patterns is written, as
    unsigned integers that wrap around; of one that did not, nothing but a checksum. A tensor that the first checkpoint
    lacks, or has with another dtype or shape, is written whole. Both checkpoints are read twice.

    Args:
        a: The first checkpoint, of any format and sharding.
        b: The second.
        target: The path to write; see `convert`. Any format will do, and a delta may be converted like a checkpoint.
        conversion: In which form to write; names and dtypes cannot be changed.
        reference: A complete checkpoint of the same model, if one of them lacks shapes; see ``open_layout``.
        dry_run: Compare, check and report without writing.
        progress: Called with the bytes written so far and the bytes to write.
        **settings: Fields of `Conversion`, as for `convert`.

    Raises:
        ConfigError: A setting would change names or dtypes, or numpy is missing.
        CheckpointError: As for `convert`.

    Example:
        >>> checkpoint_delta("base", "tuned", "delta.safetensors")
    """
    require_numpy("The difference of checkpoints")
    chosen = for_weights((conversion or Conversion()).changed(settings), "A delta")
    refuse_settings(chosen, _NAMES, "A delta holds all names and dtypes as they are")
    layouts = [opened(given, trust=chosen.trust, reference=reference, format=chosen.source_format) for given in (a, b)]
    unchanged = _SourceCheck(layouts, progress)
    layout, notes = _difference(*layouts)
    report = convert(layout, target, chosen, dry_run=dry_run, progress=unchanged)
    return replace(report, notes=(*notes, *report.notes))


def apply_delta(
    base: str | os.PathLike[str] | Layout,
    delta: str | os.PathLike[str] | Layout,
    target: str | os.PathLike[str],
    conversion: Conversion | None = None,
    *,
    reference: str | os.PathLike[str] | Layout | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> ConversionReport:
    """Write the weights of the second checkpoint from the first one and what `checkpoint_delta` wrote, bit for bit.

    The base is compared with the checksums in the delta first, so it is read twice unless its format stores checksums
    of whole tensors. ``meta`` is the base's.

    Args:
        base: The first checkpoint, of any format and sharding.
        delta: The difference.
        target: The path to write; see `convert`.
        conversion: What to write and how.
        reference: A complete checkpoint of the same model, if the base does not hold all shapes; see ``open_layout``.
        dry_run: Compare, check and report without writing.
        progress: Called with the bytes written so far and the bytes to write.
        **settings: Fields of `Conversion`, as for `convert`.

    Raises:
        ConfigError: The delta was made from another base: the message names a tensor. A setting is wrong, or numpy is
            missing.
        FormatError: ``delta`` is not a delta.
        CheckpointError: As for `convert`.
    """
    require_numpy("The difference of checkpoints")
    chosen = for_weights((conversion or Conversion()).changed(settings), "A delta")
    layout = opened(base, trust=chosen.trust, reference=reference, format=chosen.source_format)
    change = opened(delta, trust=chosen.trust)
    unchanged = _SourceCheck((layout, change), progress)
    return convert(_restored(layout, change), target, chosen, dry_run=dry_run, progress=unchanged)


def _difference(a: Layout, b: Layout) -> tuple[Layout, tuple[str, ...]]:
    ours, theirs = part_tensors(a, "model"), part_tensors(b, "model")
    if _TABLE in theirs:
        raise ConfigError(f"{str(b.path)!r} is a delta itself. Apply it first.", file=str(b.path))
    check_coverage(a, [entry.name for name, entry in ours.items() if name in theirs])
    check_coverage(b, [entry.name for entry in theirs.values()])
    table: dict[str, dict[str, str]] = {}
    tensors: dict[str, TensorEntry] = {}
    counts = dict.fromkeys(("equal", "difference", "whole"), 0)
    with OpenFiles() as files:
        both = ((ours[name], entry) for name, entry in theirs.items() if name in ours)
        files.expect(compared_extents(pair for pair in both if _is_like(*pair)))
        for name, entry in theirs.items():
            base, words = ours.get(name), unsigned(entry.dtype)
            row = {"kind": "whole", "dtype": entry.dtype}
            if base is not None and _is_like(base, entry):
                equal, crc = _compared(files, base, entry)
                row |= {"kind": "equal" if equal else "difference", "crc32": f"{crc:08x}"}
                if not equal:
                    tensors[name] = replace(BitSum.of(entry, base, words, subtract=True), name=name)
            else:
                tensors[name] = replace(entry, name=name)
            table[name] = row
            counts[row["kind"]] += 1
    tensors[_TABLE] = GivenBytes.of(_TABLE, json.dumps({"version": 1, "tensors": table}).encode())
    gone = [name for name in ours if name not in theirs]
    notes = [f"{counts['difference']} tensors differ, {counts['equal']} are equal and left out"]
    notes += [f"{counts['whole']} tensors are new, or of another dtype or shape, and written whole"] * bool(
        counts["whole"]
    )
    notes += [f"The first checkpoint alone has {name_list(gone, 5)}"] if gone else []
    tree = {name: TensorRef(name) for name in tensors}
    return Layout(b.path, b.format, 1, tensors, tree, origins=(a, b)), tuple(notes)


def _is_like(a: TensorEntry, b: TensorEntry) -> bool:
    """Tell whether the difference of two tensors is written."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bool(unsigned(a.dtype))


def _compared(files: OpenFiles, a: TensorEntry, b: TensorEntry) -> tuple[bool, int]:
    """Tell whether two tensors are equal, and return the checksum of the first."""
    equal, crc = True, 0
    for one, two in zip(tensor_blocks(files, a), tensor_blocks(files, b), strict=True):
        equal = equal and equal_bytes(one, two)
        crc = crc32(one, crc)
    return equal, crc


class _SourceCheck:
    """A ``progress`` of ``convert`` that raises if a file of a source has changed once everything is read.

    Nothing has appeared at the target then, so nothing does.

    Args:
        layouts: The sources, before they are read first.
        progress: Called each time, as by ``convert``.
    """

    def __init__(self, layouts: Iterable[Layout], progress: Progress | None) -> None:
        self._progress = progress
        self._known = {file: identity(file) for layout in layouts for file in layout.files()}

    def __call__(self, done: int, total: int) -> None:
        """Compare the files when all is done.

        Raises:
            CorruptCheckpointError: One has changed.
        """
        if done >= total:
            for file, known in self._known.items():
                if identity(file) != known:
                    raise changed(file)
        if self._progress is not None:
            self._progress(done, total)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    kind: str
    dtype: str
    crc32: int


def _restored(base: Layout, delta: Layout) -> Layout:
    changes, names = part_tensors(delta, "model"), weights_of(base).names
    tensors: dict[str, TensorEntry] = {}
    for row in _rows(delta, changes):
        change = changes.get(row.name)
        if change is None and row.kind != "equal":
            raise CorruptCheckpointError(f"{delta.path.name} lacks {row.name!r}, which it lists.", file=str(delta.path))
        if row.kind == "whole":
            tensors[row.name] = change  # type: ignore[assignment]
            continue
        entry = base.tensors[names[row.name]] if row.name in names else None
        if entry is None or entry.dtype != row.dtype:
            raise _other_base(base, delta, row.name)
        if change is not None and (change.shape, change.dtype) != (entry.shape, unsigned(entry.dtype)):
            raise _other_base(base, delta, row.name)
        check_coverage(base, [entry.name])
        if _checksum(entry) != row.crc32:
            raise _other_base(base, delta, row.name)
        tensors[row.name] = entry if change is None else BitSum.of(entry, change, entry.dtype, subtract=False)
    if {*tensors} == {*names}:
        stored = {names[name]: entry for name, entry in tensors.items()}
        return replace(base, tensors={**base.tensors, **stored}, origins=(base, delta))
    tree = {"state_dict": {name: TensorRef(name) for name in tensors}}
    named = {name: replace(entry, name=name) for name, entry in tensors.items()}
    return Layout(base.path, base.format, base.world_size, named, tree, origins=(base, delta))


def _rows(delta: Layout, changes: dict[str, TensorEntry]) -> Iterator[_Row]:
    table = changes.get(_TABLE)
    if table is None or table.dtype != "uint8" or table.nbytes > _LIMIT:
        raise FormatError(
            f"{delta.path.name} is not a delta: it has no {_TABLE!r}. `mmfsdp-cli delta` writes deltas.",
            file=str(delta.path),
        )
    check_coverage(delta, [table.name])
    with OpenFiles() as files:
        text = b"".join(bytes(block) for block in tensor_blocks(files, table))
    try:
        content = parse_json(text)
        if content["version"] != 1:
            raise FormatError(
                f"{delta.path.name} is a delta of version {content['version']!r} (expected 1). Install a newer mmfsdp.",
                file=str(delta.path),
            )
        for name, row in content["tensors"].items():
            if row["kind"] not in ("equal", "difference", "whole"):
                raise ValueError(f"the kind of {name!r} is {row['kind']!r}")
            yield _Row(name, row["kind"], row["dtype"], int(row.get("crc32", "0"), 16))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"{_TABLE} of {delta.path.name}", error, delta.path) from error


def _checksum(entry: TensorEntry) -> int:
    """Return the CRC-32 of a tensor's packed bytes: the stored one where it is of exactly those."""
    chunks = entry.chunks()
    if len(chunks) == 1 and chunks[0].crc32 is not None:
        return chunks[0].crc32
    crc = 0
    with OpenFiles() as files:
        for block in tensor_blocks(files, entry):
            crc = crc32(block, crc)
    return crc


def _other_base(base: Layout, delta: Layout, name: str) -> ConfigError:
    return ConfigError(
        f"{delta.path.name} was not made from {str(base.path)!r}: {name!r} is not the tensor that it was made from. "
        "Give the first checkpoint of the two.",
        file=str(base.path),
    )
