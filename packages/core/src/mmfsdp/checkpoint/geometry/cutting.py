"""Cuts boxes out of tensors that lie on disk: a box is a tensor of its own, with the parts of the chunks it touches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.files.casting import CastEntry
from mmfsdp.checkpoint.layout import Chunk, TensorEntry, row_major_strides

__all__ = ["cut"]


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
