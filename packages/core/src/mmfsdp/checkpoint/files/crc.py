"""CRC-32 checksums of bytes, and of two stretches of bytes together from those of each, without the bytes.

The first is isal's, several times as fast as zlib's; zlib's is used where there is no isal. Of the second: appending n
zero bytes to a message is a linear map over GF(2), applied here as 32 x 32 bit matrices squared as often as n's binary
digits ask for. The idea is Mark Adler's, in zlib: https://stackoverflow.com/a/23126768
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import ModuleType

__all__ = ["crc32", "crc32_combine", "crc32_of_stretch"]

_BLOCK = 1 << 20  # bytes: fits the second-level cache

_POLYNOMIAL = 0xEDB88320  # CRC-32 of zip and zlib, bits reversed

_Matrix = tuple[int, ...]
_Crc32 = Callable[[bytes | memoryview, int], int]


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of bytes.

    Args:
        data: The bytes; the interpreter's lock is released while many are read.
        value: CRC-32 of what comes before them.
    """
    return _implementation()(data, value)


def crc32_of_stretch(
    descriptor: int,
    begin: int,
    end: int,
    value: int = 0,
    *,
    advance: Callable[[int], None] | None = None,
    buffer: memoryview | None = None,
) -> tuple[int, int]:
    """Return the CRC-32 of a stretch of an open file, read in blocks, and where reading ended.

    Args:
        descriptor: The file.
        begin: Its first byte.
        end: The byte after its last.
        value: CRC-32 of what comes before it.
        advance: Called with the number of bytes after each block.
        buffer: Where to read to, if there is a place already; it says how large the blocks are.

    Returns:
        The CRC-32 and ``end``; if the file ends before, the CRC-32 of what there is and the size of the file.

    Raises:
        OSError: The file cannot be read.
    """
    buffer = memoryview(bytearray(max(0, min(_BLOCK, end - begin)))) if buffer is None else buffer
    while begin < end:
        view = buffer[: min(len(buffer), end - begin)]
        count = os.preadv(descriptor, [view], begin)
        if count == 0:
            break
        value = crc32(view[:count], value)
        begin += count
        if advance is not None:
            advance(count)
    return value, begin


@cache
def _implementation() -> _Crc32:
    import zlib

    return getattr(_isal(), "crc32", zlib.crc32)


@cache
def _isal() -> ModuleType | None:
    # Imported when it is first needed: commands that read no data start without it.
    try:
        from isal import isal_zlib
    except ImportError:
        return None
    return isal_zlib


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two stretches of bytes that follow each other.

    Args:
        first: CRC-32 of the first stretch.
        second: CRC-32 of the second.
        length: Length of the second in bytes.
    """
    combine = getattr(_isal(), "crc32_combine", None)  # since 1.7
    if combine is not None:
        return int(combine(first, second, length))
    return _combined(first, second, length)


def _combined(first: int, second: int, length: int) -> int:
    power = 0
    while length:
        if length & 1:
            first = _apply(_zero_bytes(power), first)
        length >>= 1
        power += 1
    return first ^ second


@cache
def _zero_bytes(power: int) -> _Matrix:
    # The map that appends 2 ** power zero bytes.
    if power:
        half = _zero_bytes(power - 1)
        return tuple(_apply(half, column) for column in half)
    matrix: _Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        matrix = tuple(_apply(matrix, column) for column in matrix)
    return matrix


def _apply(matrix: _Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if vector & 1:
            result ^= column
        vector >>= 1
        if not vector:
            break
    return result
