"""Finds the parameters in FSDP1's flat parameters, and the boxes of a tensor that a range of its elements fills.

The rule is FlatParamHandle's (torch/distributed/fsdp/_flat_param.py). With ``use_orig_params=True`` every parameter is
padded to 16 bytes; the pieces of it in a rank's file are views of that rank's part of the flat parameter, which says
where they belong. With ``False`` parameters follow each other without padding, and only the flat parameter is in the
file: the optimizer's groups, or a reference, give their names and order. Each rank has ``ceil(n / ranks)``
elements, later ones fewer or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.chunks import Chunk, Record, row_major_strides
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledShards, PickledTensor
from mmfsdp.errors import CorruptCheckpointError

__all__ = [
    "FLAT",
    "FlatRange",
    "FlatSpan",
    "FlatUnit",
    "entry_of_ranges",
    "flat_boxes",
    "flat_unit",
    "spans_in_order",
    "spans_of_views",
]

FLAT = "_flat_param"
"""The end of a flat parameter's key, after the prefix of its shard unit."""


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Consecutive elements of a flattened tensor, and where they are stored."""

    start: int
    """First element, counted from the start of the tensor."""
    stop: int
    """Element after the last."""
    offset: int
    """Offset of the first element in the file, in bytes."""
    record: Record
    """The record that holds them."""


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """The elements of a flat parameter that make up one parameter."""

    dtype: str
    """Its dtype."""
    numel: int
    """Number of its elements."""
    ranges: tuple[FlatRange, ...]
    """Where they are; ``start`` and ``stop`` count from the first element of the parameter."""
    start: tuple[str, int]
    """Prefix of its unit, and where it begins in the flat parameter: the same for tied names."""


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """The flat parameter of one shard unit, assembled from all ranks."""

    prefix: str
    """Prefix of the names of its parameters."""
    dtype: str
    """dtype of all its parameters."""
    ranges: tuple[FlatRange, ...]
    """Each rank's part; empty ones left out."""

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.ranges[-1].stop if self.ranges else 0


def flat_unit(key: str, shards: Sequence[PickledShards], files: Sequence[Path]) -> FlatUnit:
    """Assemble a flat parameter.

    Raises:
        CorruptCheckpointError: The parts do not follow each other.
    """
    ranges: list[FlatRange] = []
    for held, file in zip(shards, files, strict=True):
        if held.dtype != shards[0].dtype or held.shape != shards[0].shape or len(held.shape) != 1:
            raise CorruptCheckpointError(
                f"{key!r} is {held.dtype} of shape {list(held.shape)} in {file.name} but {shards[0].dtype} of shape "
                f"{list(shards[0].shape)} in {files[0].name}.",
                file=str(file),
            )
        for stored, (start,) in held.parts:
            if not stored.shape[0]:
                continue
            expected = ranges[-1].stop if ranges else 0
            if start != expected or stored.strides is not None or stored.dtype != held.dtype:
                raise CorruptCheckpointError(
                    f"The part of {key!r} in {file.name} begins at element {start} (expected {expected}).",
                    file=str(file),
                )
            ranges.append(FlatRange(start, start + stored.shape[0], stored.offset, stored.record))
    return FlatUnit(key.removesuffix(FLAT), shards[0].dtype, tuple(ranges))


def spans_of_views(
    units: Sequence[FlatUnit], pieces: Mapping[str, Sequence[PickledTensor | None]]
) -> dict[str, FlatSpan]:
    """Find the parameters whose pieces are views of a flat parameter (``use_orig_params=True``).

    Returns:
        Name to parameter. Names that are not views, such as buffers, are left out.

    Raises:
        CorruptCheckpointError: The pieces of a parameter do not follow each other.
    """
    homes = {held.record: (unit, held) for unit in units for held in unit.ranges}
    spans = {}
    for name, parts in pieces.items():
        found: list[FlatRange] = []
        unit: FlatUnit | None = None
        for part in parts:
            if part is None or len(part.shape) != 1 or not part.shape[0] or part.record not in homes:
                continue
            home, held = homes[part.record]
            start = held.start + (part.offset - held.offset) // itemsize(part.dtype)
            follows = unit is home and found[-1].stop == start if found else True
            if not follows or part.strides is not None or part.dtype != home.dtype:
                raise CorruptCheckpointError(
                    f"The pieces of parameter {name!r} do not follow each other; that in {part.record.file.name} "
                    f"begins at element {start} of '{home.prefix}{FLAT}'.",
                    file=str(part.record.file),
                )
            unit = home
            found.append(FlatRange(start, start + part.shape[0], part.offset, part.record))
        if unit is not None:
            begin = found[0].start
            ranges = tuple(FlatRange(r.start - begin, r.stop - begin, r.offset, r.record) for r in found)
            spans[name] = FlatSpan(unit.dtype, ranges[-1].stop, ranges, (unit.prefix, begin))
    return spans


def spans_in_order(
    unit: FlatUnit, shapes: Mapping[str, tuple[int, ...]], *, aligned: bool = False, ranks: int = 1
) -> dict[str, FlatSpan] | None:
    """Divide a flat parameter into parameters that follow each other.

    Args:
        unit: The flat parameter.
        shapes: Name to shape, in order.
        aligned: Whether each begins at a multiple of 16 bytes, and the end is padded to a multiple of the number of
            ranks (``use_orig_params=True``).
        ranks: Their number.

    Returns:
        Name to parameter; ``None`` if their sizes do not add up to the size of the flat parameter.
    """
    step = max(16 // itemsize(unit.dtype), 1) if aligned else 1
    spans, end = {}, 0
    for name, shape in shapes.items():
        begin = -(-end // step) * step
        end = begin + math.prod(shape)
        spans[name] = _span(unit, begin, end)
    padded = -(-end // ranks) * ranks if aligned else end
    return spans if unit.numel in (end, padded) else None


def _span(unit: FlatUnit, begin: int, end: int) -> FlatSpan:
    ranges = tuple(
        FlatRange(
            max(held.start, begin) - begin,
            min(held.stop, end) - begin,
            held.offset + (max(held.start, begin) - held.start) * itemsize(unit.dtype),
            held.record,
        )
        for held in unit.ranges
        if max(held.start, begin) < min(held.stop, end)
    )
    return FlatSpan(unit.dtype, end - begin, ranges, (unit.prefix, begin))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes that a range of elements of a row-major tensor is made of, in order.

    Args:
        shape: Sizes of the tensor.
        start: First element.
        stop: Element after the last.

    Yields:
        First element of the box, its offsets and its sizes: at most ``2 * len(shape) - 1`` of them.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield start, (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _within_row(shape, start, stop)
        return
    yield from _within_row(shape, start, first * row)
    if first < last:
        yield first * row, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within_row(shape, last * row, stop)


def _within_row(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    row = math.prod(shape[1:])
    index = start // row if row else 0
    for at, offsets, sizes in flat_boxes(shape[1:], start - index * row, stop - index * row):
        yield index * row + at, (index, *offsets), (1, *sizes)


def entry_of_ranges(
    name: str, dtype: str, shape: tuple[int, ...], ranges: Iterable[FlatRange], order: tuple[int, ...] | None = None
) -> TensorEntry:
    """Return a tensor whose flattened elements lie in the given ranges.

    Args:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
        ranges: Where its elements are.
        order: The dimensions from the slowest to the fastest in memory, if they were not flattened in row-major order.
    """
    item = itemsize(dtype)
    dims = tuple(range(len(shape))) if order is None else order
    order_back = [dims.index(dim) for dim in range(len(shape))]
    chunks = []
    for held in ranges:
        for at, offsets, sizes in flat_boxes(tuple(shape[dim] for dim in dims), held.start, held.stop):
            strides = row_major_strides(sizes)
            chunks.append(
                Chunk(
                    held.record.file,
                    held.offset + (at - held.start) * item,
                    math.prod(sizes) * item,
                    tuple(offsets[dim] for dim in order_back),
                    tuple(sizes[dim] for dim in order_back),
                    None if order_back == sorted(order_back) else tuple(strides[dim] for dim in order_back),
                    held.record,
                )
            )
    return TensorEntry(name, dtype, shape, tuple(chunks))
