"""Chunks of tensors: boxes, and the extents of files that hold or will hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds, Boxes

__all__ = ["Chunk", "Record", "Unlocated", "row_major_strides", "simplified_strides"]


@dataclass(frozen=True, slots=True)
class Record:
    """An extent of a file that has its own checksum, such as one entry of a zip archive."""

    file: Path
    """The file that contains it."""
    offset: int
    """Offset of its data in the file, in bytes."""
    nbytes: int
    """Length of its data in bytes."""
    crc32: int | None
    """CRC-32 of its data; ``None`` where the writer computed none."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of one tensor, and the bytes that hold it."""

    file: Path
    """The file that contains it."""
    offset: int
    """Offset of its first element in the file, in bytes."""
    nbytes: int
    """Bytes that the elements of the box take when packed."""
    box_offsets: tuple[int, ...]
    """Offsets of the box in the tensor, in elements, one per dimension."""
    box_sizes: tuple[int, ...]
    """Size of the box in elements, one per dimension."""
    strides: tuple[int, ...] | None = None
    """Steps in elements between neighbours in the file; ``None`` for packed row-major order."""
    record: Record | None = None
    """The record that contains the bytes, if there is one. It may be larger than the chunk."""

    @property
    def crc32(self) -> int | None:
        """CRC-32 of exactly the bytes of this chunk, where one is stored."""
        record = self.record
        if record is None or self.strides is not None or (record.offset, record.nbytes) != (self.offset, self.nbytes):
            return None
        return record.crc32

    @property
    def bounds(self) -> Bounds:
        """The box."""
        return self.box_offsets, self.box_sizes

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.box_sizes)

    @property
    def span(self) -> int:
        """Bytes between the first byte and the last that the box touches in the file, both included."""
        if self.strides is None or self.numel == 0:
            return self.nbytes
        item = self.nbytes // self.numel
        return item * (1 + sum((size - 1) * step for size, step in zip(self.box_sizes, self.strides, strict=True)))

    def shared(self, offsets: Sequence[int], sizes: Sequence[int]) -> Bounds:
        """Return the box that it shares with another box of the tensor; a size is 0 where they do not meet."""
        low = tuple(map(max, self.box_offsets, offsets))
        ends = zip(self.box_offsets, self.box_sizes, offsets, sizes, strict=True)
        return low, tuple(max(0, min(a + b, c + d) - first) for first, (a, b, c, d) in zip(low, ends, strict=True))

    def cut(self, item: int, offsets: Sequence[int], sizes: Sequence[int]) -> Chunk | None:
        """Return the part shared with a box of the tensor, as a chunk of that box; ``None`` if they do not meet.

        Args:
            item: Bytes per element.
            offsets: Where the box begins, in elements.
            sizes: Its size in elements.
        """
        low, size = self.shared(offsets, sizes)
        if 0 in size:
            return None
        steps = self.strides or row_major_strides(self.box_sizes)
        skipped = sum((a - b) * step for a, b, step in zip(low, self.box_offsets, steps, strict=True))
        return replace(
            self,
            offset=self.offset + skipped * item,
            nbytes=math.prod(size) * item,
            box_offsets=tuple(a - b for a, b in zip(low, offsets, strict=True)),
            box_sizes=size,
            strides=simplified_strides(size, steps),
        )


@dataclass(frozen=True, slots=True)
class Unlocated:
    """Chunks whose offsets are still unknown, because finding them means reading each file, as in DCP."""

    boxes: Boxes
    """The boxes of the chunks."""
    locate: Callable[[Mapping[Bounds, Any]], tuple[Chunk, ...]]
    """Finds the chunks of some boxes and remembers them. It can be pickled, so that another rank can call it."""
    file: str = "rank{}.pth"
    """The name of a rank's file, where boxes are looked for by rank."""


def row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the steps in elements between neighbours of a packed row-major box of these sizes."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)


@lru_cache(4096)  # a model has few distinct shapes
def simplified_strides(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides, or ``None`` for a packed row-major box.

    The step along a dimension of one element means nothing; torch leaves any number there.
    """
    matters = zip(sizes, strides, row_major_strides(sizes), strict=True)
    return None if 0 in sizes or all(size == 1 or step == packed for size, step, packed in matters) else strides
