"""Detects damage and forgery in a checkpoint: CRC-32 checksums, and JSON, names and paths that mislead a reader.

isal computes checksums several times as fast as zlib, which is used where isal is not installed.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mmfsdp.basics.descriptors import expect, is_remote, read_into, size_of
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = [
    "Extent",
    "Scanned",
    "add_rank_file",
    "crc32",
    "crc32_combine",
    "crc32_of_stretch",
    "inside",
    "parse_json",
    "refuse_special",
    "regular_files",
    "scan_file",
]

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
        buffer: Memory to read into, if there is any already; blocks have its size.

    Returns:
        The CRC-32 and ``end``; if the file ends before, the CRC-32 of what there is and the size of the file.

    Raises:
        OSError: The file cannot be read.
    """
    buffer = memoryview(bytearray(max(0, min(_BLOCK, end - begin)))) if buffer is None else buffer
    while begin < end:
        view = buffer[: min(len(buffer), end - begin)]
        count = read_into(descriptor, view, begin)
        if count == 0:
            break
        value = crc32(view[:count], value)
        begin += count
        if advance is not None:
            advance(count)
    return value, begin


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
        expect(descriptor, [(0, size_of(descriptor))] if whole else (extents[index] for index in order))

        def read(begin: int, end: int, crc: int = 0) -> int | None:
            crc, stop = crc32_of_stretch(descriptor, begin, end, crc, advance=advance, buffer=buffer)
            return None if stop < end else crc

        for index in order:
            begin, length = extents[index]
            between = read(position, begin, joined) if whole and begin >= position else None
            found = crcs[index] = read(begin, begin + length)
            if between is not None and found is not None:
                joined, position = crc32_combine(between, found, length), begin + length
        end = read(position, size_of(descriptor), joined) if whole else None
    return Scanned(tuple(crcs), end)


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


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text. An object with the same key twice, NaN and infinity are errors.

    Raises:
        ValueError: The text is not JSON, or two readers could understand it differently.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)


def add_rank_file(files: dict[int, Path], rank: int, path: Path) -> None:
    """Add the file of a rank to those that were found in its directory.

    Raises:
        CorruptCheckpointError: The rank has one already.
    """
    if rank in files:
        raise CorruptCheckpointError(
            f"{path.parent.name} holds two files of rank {rank}: {files[rank].name} and {path.name}. One is left over "
            "from another save; remove it.",
            file=str(path),
        )
    files[rank] = path


def inside(directory: Path, name: str, origin: Path) -> Path:
    """Return the path of a file that must lie in a directory, following links. The file need not exist.

    Args:
        directory: Where the file must be.
        name: Its path relative to the directory, as some file gives it.
        origin: That file, for messages.

    Raises:
        FormatError: The name leads out of the directory (other than to the blobs of Hugging Face's cache), or is not
            the name of a file.
    """
    path = directory / name
    parts = Path(name).parts
    if "\0" in name or not parts or Path(name).is_absolute() or ".." in parts:
        raise FormatError(f"{origin.name} names the file {name!r}, which is not in its directory.", file=str(origin))
    try:
        target, home = path.resolve(), directory.resolve()
        leads_out = not any(target.is_relative_to(root) for root in (home, *_blobs(home)))
    except (OSError, RuntimeError) as error:  # links in a circle
        raise FormatError(f"{origin.name} names the file {name!r}: {error}.", file=str(origin)) from error
    if leads_out:
        raise FormatError(
            f"{origin.name} names the file {name!r}, which is a link out of its directory. If you trust it, put a copy "
            "of the file in its place.",
            file=str(path),
        )
    refuse_special(path, directory=False)
    return path


def regular_files(directory: Path) -> frozenset[str]:
    """Return the names of a directory's files that are no links and nothing special, which `inside` need not look at.

    Args:
        directory: The directory. For one on a server nothing is returned.
    """
    if is_remote(directory):
        return frozenset()
    with os.scandir(directory) as entries:
        return frozenset(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def refuse_special(path: Path, *, directory: bool = True) -> None:
    """Raise ``FormatError`` for a path that is neither a file nor a directory, such as a pipe: opening it can block.

    Args:
        path: The path that will be opened; it need not exist.
        directory: Whether it may be a directory.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # the caller reports it when it opens the path
        return
    if not stat.S_ISREG(mode) and not (directory and stat.S_ISDIR(mode)):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise FormatError(f"{path.name} is {kind}, and not a file.", file=str(path))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {next(name for name in counts if counts[name] > 1)!r} appears twice")
    return content


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _blobs(directory: Path) -> list[Path]:
    """Return where the files of a snapshot in Hugging Face's cache lie, which are links.

    https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    repository = directory.parent.parent
    of_a_cache = directory.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--"))
    return [repository / "blobs"] if of_a_cache else []
