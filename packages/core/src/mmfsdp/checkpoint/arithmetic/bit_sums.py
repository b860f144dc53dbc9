"""Adds and subtracts the bit patterns of tensors, without loss, and holds bytes that are in no file yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import raw, tensor_blocks

__all__ = ["BitSum", "GivenBytes", "unsigned"]

_BLOCK = 1 << 19  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BitSum(ComputedEntry):
    """The sum or difference of two tensors of one shape, whose bits are taken as unsigned integers that wrap around.

    ``(b - a) + a`` is ``b`` for all bit patterns, NaNs and negative zeros too: integers modulo ``2**n`` form a group.
    """

    subtract: bool
    """Whether the second part is subtracted from the first."""

    @classmethod
    def of(cls, one: TensorEntry, two: TensorEntry, dtype: str, *, subtract: bool) -> BitSum:
        """Return the sum or difference, of the first tensor's name, and of a dtype as wide as theirs."""
        return cls(one.name, dtype, one.shape, (*one.chunks(), *two.chunks()), (one, two), subtract=subtract)

    @property
    def formula(self) -> tuple[object, ...]:
        return "bit sum", self.subtract

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> BitSum:
        one, two = (part.cut(offsets, sizes) for part in self.parts)
        return BitSum.of(one, two, self.dtype, subtract=self.subtract)

    def cast(self, dtype: str, overflow: Callable[[int], None]) -> ComputedEntry:
        if dtype == self.dtype:
            return self
        return CastEntry(self.name, dtype, self.shape, self.chunks(), (self,), overflow)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        import numpy as np

        one, two = self.parts
        operation = np.subtract if self.subtract else np.add
        for a, b in zip(tensor_blocks(files, one, _BLOCK), tensor_blocks(files, two, _BLOCK), strict=True):
            yield operation(raw(a, one.dtype), raw(b, two.dtype)).view(np.uint8).data


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBytes(ComputedEntry):
    """A vector of bytes that are given."""

    data: bytes
    """The bytes."""

    @classmethod
    def of(cls, name: str, data: bytes) -> GivenBytes:
        """Return a tensor of dtype uint8."""
        return cls(name, "uint8", (len(data),), (), (), data=data)

    @property
    def formula(self) -> bytes:
        return self.data

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> GivenBytes:
        return GivenBytes.of(self.name, self.data[offsets[0] : offsets[0] + sizes[0]])

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        yield memoryview(self.data)


def unsigned(dtype: str) -> str:
    """Return the dtype of unsigned integers as wide as another dtype; empty if there is none."""
    return {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}.get(itemsize(dtype), "")
