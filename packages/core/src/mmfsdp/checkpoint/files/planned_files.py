"""Describes a file before it is written: which tensors lie where, and everything around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mmfsdp.checkpoint.layout import TensorEntry

__all__ = ["Piece", "PlannedFile"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or a box of one, at its place in a file that will be written."""

    entry: TensorEntry
    """The tensor; it is written packed in row-major order."""
    at: int
    """Where its first element goes, in bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that will be written."""

    name: str
    """Its path within the target; empty where the target is this one file."""
    size: int
    """Its length in bytes."""
    pieces: tuple[Piece, ...]
    """The tensor data, in file order."""
    blocks: Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]
    """Given the CRC-32 of each piece, returns all other bytes with their offsets, in file order. Bytes in neither are
    zero."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(piece.entry.nbytes for piece in self.pieces)
