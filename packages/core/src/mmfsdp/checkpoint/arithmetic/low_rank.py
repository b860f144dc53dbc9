"""Adds the product of two thin matrices to a weight while it is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.chunks import row_major_strides, simplified_strides
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import tensor_blocks, values
from mmfsdp.checkpoint.files.rounding import Rounding

__all__ = ["LowRankSum", "transposed"]

_ELEMENTS = 1 << 18  # per block: twice as many leave the cache; with fewer, threads wait for Python's lock


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankSum(ComputedEntry):
    """A weight plus a multiple of a product, computed in float64 and rounded once.

    The parts are the weight, of shape ``(rows, ...)``; the left factor, ``(rows, rank, ...)`` with further sizes of 1;
    and the right factor, ``(rank, ...)``, which has the weight's further sizes.
    """

    scale: float
    """The multiple."""

    @classmethod
    def of(cls, base: TensorEntry, left: TensorEntry, right: TensorEntry, scale: float) -> LowRankSum:
        """Return the sum, of the weight's name and dtype."""
        parts = base, left, right
        chunks = tuple(chunk for part in parts for chunk in part.chunks())
        return cls(base.name, base.dtype, base.shape, chunks, parts, scale=scale)

    @property
    def formula(self) -> tuple[object, ...]:
        return "low rank sum", self.scale

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> LowRankSum:
        base, left, right = self.parts
        parts = (
            base.cut(offsets, sizes),
            left.cut((offsets[0], *(0,) * (len(left.shape) - 1)), (sizes[0], *left.shape[1:])),
            right.cut((0, *offsets[1:]), (right.shape[0], *sizes[1:])),
        )
        return replace(LowRankSum.of(*parts, self.scale), dtype=self.dtype, overflow=self.overflow)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        base, left, right = self.parts
        if not self.numel:
            return
        columns, rank = math.prod(base.shape[1:]), right.shape[0]
        rows = max(1, min(base.shape[0], _ELEMENTS // columns))
        streams = zip(
            tensor_blocks(files, base, rows * columns * itemsize(base.dtype)),
            tensor_blocks(files, left, rows * rank * itemsize(left.dtype)),
            strict=True,
        )
        whole = [values(block, right.dtype).astype(np.float64) for block in tensor_blocks(files, right)]
        factor = np.concatenate(whole).reshape(rank, columns)
        result, room = np.empty((rows, columns)), np.empty(rows * columns, np.float32)
        rounding = Rounding(self.dtype, rows * columns)
        overflowed = 0
        for weight, some in streams:
            thin = self.scale * values(some, left.dtype).astype(np.float64).reshape(-1, rank)
            added = result[: len(thin)]
            with np.errstate(all="ignore"):
                np.matmul(thin, factor, out=added)
                np.add(added, values(weight, base.dtype, room).reshape(-1, columns), out=added)
            data, lost = rounding(added.reshape(-1))
            overflowed += lost
            yield data
        if overflowed:
            self.overflow(overflowed)


def transposed(entry: TensorEntry) -> TensorEntry:
    """Return a matrix with rows and columns exchanged; no byte moves."""
    chunks = tuple(
        replace(
            chunk,
            box_offsets=chunk.box_offsets[::-1],
            box_sizes=chunk.box_sizes[::-1],
            strides=simplified_strides(
                chunk.box_sizes[::-1], (chunk.strides or row_major_strides(chunk.box_sizes))[::-1]
            ),
        )
        for chunk in entry.chunks()
    )
    return TensorEntry(entry.name, entry.dtype, entry.shape[::-1], chunks)
