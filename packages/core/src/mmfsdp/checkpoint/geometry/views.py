"""Tensors made of other stored tensors without copying: a box of one, one with another dtype, one without repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.layout import Chunk, TensorEntry, row_major_strides

__all__ = ["CastEntry", "cut", "without_repeats"]


@dataclass(frozen=True, slots=True)
class CastEntry(TensorEntry):
    """A tensor to be written with another dtype; its chunks are those of the source."""

    source: TensorEntry
    """The tensor as it is stored."""
    overflow: Callable[[str, int], None]
    """Called with the name and the number of elements that were too large for the dtype, if there are any."""

    @classmethod
    def of(cls, source: TensorEntry, dtype: str, overflow: Callable[[str, int], None]) -> CastEntry:
        """Return a tensor cast to another dtype."""
        return cls(source.name, dtype, source.shape, source.chunks(), source, overflow)


def cut(entry: TensorEntry, offsets: Sequence[int], sizes: Sequence[int]) -> TensorEntry:
    """Return a box of a tensor as a tensor of its own.

    Args:
        entry: The tensor; one that is cast stays so.
        offsets: Where the box begins, in elements.
        sizes: Its size in elements.
    """
    if isinstance(entry, CastEntry):
        return CastEntry.of(cut(entry.source, offsets, sizes), entry.dtype, entry.overflow)
    item = itemsize(entry.dtype)
    chunks = tuple(part for chunk in entry.chunks() for part in _cut_chunk(chunk, item, offsets, sizes))
    return TensorEntry(entry.name, entry.dtype, tuple(sizes), chunks)


def _cut_chunk(chunk: Chunk, item: int, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Chunk]:
    low = [max(a, b) for a, b in zip(chunk.box_offsets, offsets, strict=True)]
    ends = zip(chunk.box_offsets, chunk.box_sizes, offsets, sizes, strict=True)
    high = [min(a + b, c + d) for a, b, c, d in ends]
    size = tuple(b - a for a, b in zip(low, high, strict=True))
    if any(number <= 0 for number in size):
        return
    steps = chunk.strides or row_major_strides(chunk.box_sizes)
    skipped = sum((a - b) * step for a, b, step in zip(low, chunk.box_offsets, steps, strict=True))
    packed = chunk.strides is None and _is_packed(size, steps)
    yield replace(
        chunk,
        offset=chunk.offset + skipped * item,
        nbytes=math.prod(size) * item,
        box_offsets=tuple(a - b for a, b in zip(low, offsets, strict=True)),
        box_sizes=size,
        strides=None if packed else steps,
    )


def _is_packed(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return all(
        size == 1 or step == own
        for size, step, own in zip(sizes, strides, row_major_strides(tuple(sizes)), strict=True)
    )


def without_repeats(*entries: TensorEntry) -> tuple[list[TensorEntry], int]:
    """Return tensors of one shape without the repetitions they have in common, and how often each element occurs.

    A view made by ``expand`` can have more elements than any disk, though only a few are stored.

    Args:
        entries: The tensors; their chunks must cover them (see ``check_coverage``).
    """
    shape = entries[0].shape
    dims = [dim for dim, size in enumerate(shape) if size > 1 and all(_repeats(entry, dim) for entry in entries)]
    if not dims:
        return list(entries), 1
    sizes = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    return [_resized(entry, sizes) for entry in entries], math.prod(shape[dim] for dim in dims)


def _repeats(entry: TensorEntry, dim: int) -> bool:
    chunks = entry.chunks()
    return len(chunks) == 1 and chunks[0].strides is not None and chunks[0].strides[dim] == 0


def _resized(entry: TensorEntry, sizes: tuple[int, ...]) -> TensorEntry:
    chunk = replace(entry.chunks()[0], box_sizes=sizes, nbytes=math.prod(sizes) * itemsize(entry.dtype))
    return replace(entry, shape=sizes, stored=(chunk,))
