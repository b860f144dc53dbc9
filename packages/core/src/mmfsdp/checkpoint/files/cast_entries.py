"""Casts floating point tensors block by block while they are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import tensor_blocks, values
from mmfsdp.checkpoint.files.rounding import Rounding

__all__ = ["CastEntry"]

_BLOCK = 1 << 19  # bytes of the source: what is made of it fits the second-level cache too


@dataclass(frozen=True, slots=True)
class CastEntry(ComputedEntry):
    """A tensor that is written with another dtype."""

    @classmethod
    def of(cls, source: TensorEntry, dtype: str, overflow: Callable[[int], None]) -> ComputedEntry:
        """Return a tensor cast to another dtype; a computed tensor is rounded to that dtype at once."""
        if (computed := source.cast(dtype, overflow)) is not None:
            return computed
        return cls(source.name, dtype, source.shape, source.chunks(), (source,), overflow)

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> ComputedEntry:
        return CastEntry.of(self.parts[0].cut(offsets, sizes), self.dtype, self.overflow)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        return self._rounded(tensor_blocks(files, self.parts[0], _BLOCK))

    def rounded(self, data: memoryview) -> Iterator[memoryview]:
        """Yield elements of the source, which are in memory, as they are written; the next block may overwrite one.

        Args:
            data: Whole elements of the source.
        """
        return self._rounded(data[begin : begin + _BLOCK] for begin in range(0, len(data), _BLOCK))

    def _rounded(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        import numpy as np

        [source], overflowed = self.parts, 0
        most = min(_BLOCK // itemsize(source.dtype), source.numel)
        room, rounding = np.empty(most, np.float32), Rounding(self.dtype, most)
        for block in blocks:
            data, count = rounding(values(block, source.dtype, room))
            overflowed += count
            yield data
        if overflowed:
            self.overflow(overflowed)
