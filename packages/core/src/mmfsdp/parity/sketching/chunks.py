"""Divides boxes of tensors into chunks whose numbers do not depend on sharding. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["WIDTH", "Axis", "Chunks", "chunks_of"]

WIDTH = 128
"""The most elements in a chunk."""
_FEWEST = 48  # elements in a chunk; if no such number divides a row, its last chunk is padded

Axis = tuple[int, int, int]
"""The first index of a box, how many it has, and how many the whole dimension has."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a box of a tensor."""

    width: int
    """Elements of a chunk."""
    axes: tuple[Axis, ...]
    """Dimensions of the whole tensor; the last one counts chunks. They tell which chunks the box has."""
    inner: int
    """Number of leading dimensions whose elements are not divided."""
    pad: tuple[int, int]
    """Zeros before and after the elements, in each row of chunks."""
    filled: tuple[tuple[int, int], ...]
    """The offset and whole size of each divided dimension, if the box must be padded with zeros; else empty."""


@lru_cache(maxsize=4096)
def chunks_of(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], leading: int) -> Chunks:
    """Return the chunks of a box that has elements.

    The elements of as few of the last dimensions as hold `WIDTH` are divided, so that a box seldom has to be padded.

    Args:
        offsets: Where the box begins, in elements, one per dimension.
        sizes: The box's shape.
        shape: The shape of the whole tensor, which has a dimension.
        leading: How many leading dimensions count as one.
    """
    inner = len(shape) - 1
    while inner >= leading and math.prod(shape[inner:]) < WIDTH:
        inner -= 1
    inner = inner if inner >= leading else 0
    row, unit = math.prod(shape[inner:]), math.prod(shape[inner + 1 :])
    width = next((width for width in range(WIDTH, _FEWEST - 1, -1) if row % width == 0), WIDTH)
    is_filled = sizes[inner + 1 :] != shape[inner + 1 :]
    start, count = (0, row) if is_filled else (offsets[inner] * unit, sizes[inner] * unit)
    before, after = start % width, -(start + count) % width
    last = ((start - before) // width, (before + count + after) // width, -(-row // width))
    return Chunks(
        width,
        (*zip(offsets[:inner], sizes[:inner], shape[:inner], strict=True), last),
        inner,
        (before, after),
        tuple(zip(offsets[inner:], shape[inner:], strict=True)) if is_filled else (),
    )
