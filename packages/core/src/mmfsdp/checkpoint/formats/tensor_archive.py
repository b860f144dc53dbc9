"""Plans archives of ``torch.save`` that hold one tensor each: those of one dtype and shape differ in little."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mmfsdp.checkpoint.files.planned_files import Piece
from mmfsdp.checkpoint.formats.torch_zip_writer import plan_archive
from mmfsdp.checkpoint.layout import TensorEntry, TensorRef

__all__ = ["TensorArchive"]


class TensorArchive:
    """One tensor as torch would save it, within a larger file.

    Args:
        entry: The tensor.
    """

    __slots__ = ("_entry", "_frame")

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self._frame = _frame(entry.dtype, entry.shape)

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self._frame.before) + self._entry.nbytes + len(self._frame.after)

    def pieces(self, base: int) -> tuple[Piece, ...]:
        """Return the tensor data of an archive that begins at byte ``base`` of its file."""
        return (Piece(self._entry, base + len(self._frame.before)),)

    def blocks(self, base: int, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield what lies before and after the data, given its CRC-32."""
        frame, crc = self._frame, struct.pack("<I", crcs[0])
        yield base, _patched(frame.before, frame.crc_before, crc)
        yield base + len(frame.before) + self._entry.nbytes, _patched(frame.after, frame.crc_after, crc)


@dataclass(frozen=True, slots=True)
class _Frame:
    before: bytes
    crc_before: int  # where the checksum goes, in bytes
    after: bytes
    crc_after: int


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> _Frame:
    entry = TensorEntry("", dtype, shape, ())
    archive = plan_archive(TensorRef(""), {"": entry})
    [piece] = archive.pieces(0)
    # The checksum goes where archives with different checksums differ.
    (before, after), (other, another) = (
        [
            b"".join(block for at, block in archive.blocks(0, [crc]) if (at < piece.at) is first)
            for first in (True, False)
        ]
        for crc in (0, 0xFFFFFFFF)
    )
    return _Frame(before, _first_difference(before, other), after, _first_difference(after, another))


def _first_difference(one: bytes, other: bytes) -> int:
    return next(at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right)


def _patched(data: bytes, at: int, crc: bytes) -> bytes:
    return data[:at] + crc + data[at + len(crc) :]
