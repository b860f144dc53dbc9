"""Works out CRC-32 checksums of a file in one pass: of stretches of it, of all of it, or both."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.checkpoint.files.crc import crc32_combine, crc32_of_stretch

__all__ = ["Extent", "Scanned", "scan_file"]

_BLOCK = 1 << 20  # bytes: fits the second-level cache

Extent = tuple[int, int]
"""Offset and length of a stretch, in bytes."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """Checksums of a file."""

    crcs: tuple[int | None, ...]
    """CRC-32 of each stretch; ``None`` where the file ends within it."""
    whole: int | None
    """CRC-32 of the whole file, if it was asked for."""


def scan_file(
    path: Path, extents: Sequence[Extent], *, whole: bool = False, advance: Callable[[int], None] | None = None
) -> Scanned:
    """Return the checksums of a file, reading each byte once where the stretches do not overlap.

    Args:
        path: The file.
        extents: Stretches of it.
        whole: Work out the CRC-32 of the whole file too.
        advance: Called with the number of bytes after each block.

    Raises:
        OSError: The file cannot be read.
    """
    order = sorted(range(len(extents)), key=lambda index: extents[index])
    crcs: list[int | None] = [None] * len(extents)
    buffer = memoryview(bytearray(_BLOCK))
    joined, position = 0, 0
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()

        def read(begin: int, end: int, crc: int = 0) -> int | None:
            crc, stop = crc32_of_stretch(descriptor, begin, end, crc, advance=advance, buffer=buffer)
            return None if stop < end else crc

        for index in order:
            begin, length = extents[index]
            between = read(position, begin, joined) if whole and begin >= position else None
            found = crcs[index] = read(begin, begin + length)
            if between is not None and found is not None:
                joined, position = crc32_combine(between, found, length), begin + length
        end = read(position, os.fstat(descriptor).st_size, joined) if whole else None
    return Scanned(tuple(crcs), end)
