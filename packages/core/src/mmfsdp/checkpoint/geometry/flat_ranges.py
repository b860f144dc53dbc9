"""Places parts of a flattened tensor in the tensor itself: a range of elements is a few boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.layout import Chunk, Record, TensorEntry, row_major_strides

__all__ = ["FlatRange", "entry_of_ranges", "flat_boxes"]


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
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    ranges: Iterable[FlatRange],
    order: tuple[int, ...] | None = None,
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
    place = [dims.index(dim) for dim in range(len(shape))]
    chunks = []
    for held in ranges:
        for at, offsets, sizes in flat_boxes(tuple(shape[dim] for dim in dims), held.start, held.stop):
            strides = row_major_strides(sizes)
            chunks.append(
                Chunk(
                    held.record.file,
                    held.offset + (at - held.start) * item,
                    math.prod(sizes) * item,
                    tuple(offsets[dim] for dim in place),
                    tuple(sizes[dim] for dim in place),
                    None if place == sorted(place) else tuple(strides[dim] for dim in place),
                    held.record,
                )
            )
    return TensorEntry(name, dtype, shape, tuple(chunks))
