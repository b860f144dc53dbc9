"""Works out checksums of a file in one pass: of stretches of it, of all of it, or both."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Extent", "Scanned", "scan_file"]

_BLOCK = 1 << 20  # bytes: fits the second-level cache, so that a second checksum costs no second trip to memory

Extent = tuple[int, int]
"""Offset and length of a stretch, in bytes."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """Checksums of a file."""

    crcs: tuple[int | None, ...]
    """CRC-32 of each stretch; ``None`` where the file ends within it."""
    xxh3_64: str | None
    """XXH3 hash of 64 bits of the whole file as 16 hexadecimal digits, if it was asked for."""


def scan_file(
    path: Path, extents: Sequence[Extent], *, whole: bool = False, advance: Callable[[int], None] | None = None
) -> Scanned:
    """Return the checksums of a file, reading each byte once where the stretches do not overlap.

    Args:
        path: The file.
        extents: Stretches of it.
        whole: Hash all of the file too.
        advance: Called with the number of bytes after each block.

    Raises:
        OSError: The file cannot be read.
    """
    order = sorted(range(len(extents)), key=lambda index: extents[index])
    crcs: list[int | None] = [None] * len(extents)
    buffer = memoryview(bytearray(_BLOCK))
    digest = _Digest() if whole else None
    position = 0
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()

        def read(begin: int, end: int, crc: int, hashed: bool) -> int | None:
            while begin < end:
                view = buffer[: min(_BLOCK, end - begin)]
                count = os.preadv(descriptor, [view], begin)
                if count == 0:
                    return None
                crc = zlib.crc32(view[:count], crc)
                if digest is not None and hashed:
                    digest.update(view[:count])
                begin += count
                if advance is not None:
                    advance(count)
            return crc

        for index in order:
            begin, length = extents[index]
            if begin < position or digest is None:  # overlaps what has been read, or nothing between is asked for
                crcs[index] = read(begin, begin + length, 0, hashed=False)
                continue
            read(position, begin, 0, hashed=True)
            crcs[index] = read(begin, begin + length, 0, hashed=True)
            position = begin + length
        if digest is not None:
            read(position, os.fstat(descriptor).st_size, 0, hashed=True)
    return Scanned(tuple(crcs), digest.text() if digest is not None else None)


class _Digest:
    def __init__(self) -> None:
        import xxhash

        self._state = xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        self._state.update(data)

    def text(self) -> str:
        return self._state.hexdigest()
