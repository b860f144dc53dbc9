"""Reads where the entries of a stored (uncompressed) zip archive lie.

PKWARE's APPNOTE.TXT, sections 4.3 and 4.5.3 (zip64), defines the structures:
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mmfsdp.basics.descriptors import prefetch, read_at, size_of
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = [
    "CENTRAL",
    "CENTRAL_CRC",
    "DESCRIPTOR_CRC",
    "END",
    "END64",
    "IN_ZIP64",
    "LOCAL",
    "LOCAL_CRC",
    "LOCATOR",
    "UTF8",
    "ZipRecord",
    "read_records",
]

LOCAL = struct.Struct("<4s5H3L2H")
"""Local header of an entry, before its name."""
CENTRAL = struct.Struct("<4s6H3L5H2L")
"""Entry of the central directory, before its name."""
END = struct.Struct("<4s4H2LH")
"""End record, before its comment."""
END64 = struct.Struct("<4sQ2H2L4Q")
"""End record of zip64."""
LOCATOR = struct.Struct("<4sLQL")
"""Where the end record of zip64 is."""
IN_ZIP64 = 0xFFFFFFFF
"""In place of a number that does not fit into 32 bits, and is in a zip64 field."""
UTF8 = 0x800
"""Flag: the name is in UTF-8."""

LOCAL_CRC = 14
"""Bytes from the beginning of a local header to its CRC-32."""
CENTRAL_CRC = 16
"""Bytes from the beginning of an entry of the central directory to its CRC-32."""
DESCRIPTOR_CRC = 4
"""Bytes from the end of the data to the CRC-32 of the descriptor that may follow it."""

_DESCRIPTOR = 0x8
_TAIL = 4096  # bytes: the end records, and all of a small archive's directory
_ENDING = 1 << 16  # bytes that are asked of a server at once: the directory, and the small entries before it
_NEAR = 4096  # bytes from one local header to the next up to which many of them are read at once
_BLOCK = 1 << 17  # bytes


class ZipRecord(NamedTuple):
    """One stored entry of an archive."""

    name: str
    """Its name in the archive."""
    offset: int
    """Where its data begins in the file, in bytes."""
    nbytes: int
    """Length of its data in bytes."""
    crc32: int | None
    """CRC-32 of its data; ``None`` where the writer computed none."""
    header: int
    """Offset of its local header in the file, in bytes."""
    central: int
    """Offset of its entry of the central directory in the file, in bytes."""
    descriptor: bool
    """Whether a descriptor follows its data."""


def read_records(path: Path, begin: int = 0, end: int | None = None, source: int | None = None) -> dict[str, ZipRecord]:
    """Return the entries of an archive by name, reading only its directory and local headers.

    Args:
        path: The file.
        begin: Where the archive begins, in bytes, if it is only part of the file.
        end: Where it ends; at the end of the file by default.
        source: Descriptor of the file, if it is open.

    Raises:
        CorruptCheckpointError: The archive is truncated or its directory is damaged.
        FormatError: An entry is compressed, or encrypted.
    """
    if source is None:
        with path.open("rb", buffering=0) as file:
            return read_records(path, begin, end, file.fileno())
    size = size_of(source) if end is None else end
    if end is None:
        prefetch(source, [(max(begin, size - _ENDING), _ENDING)])
    try:
        start, directory = _read_directory(source, begin, size)
        entries = list(_entries(directory))
    except (struct.error, ValueError) as error:  # invalid UTF-8 is a ValueError
        raise CorruptCheckpointError(
            f"{path.name} is truncated or damaged: its zip directory cannot be read ({error}).", file=str(path)
        ) from error
    records: dict[str, ZipRecord] = {}
    last, ordered = begin, True
    prefetch(source, ((begin + entry.header, LOCAL.size) for entry in entries))
    headers = _Headers(source, size, near=size - begin < _NEAR * len(entries))
    for entry in entries:
        name, at = entry.name, begin + entry.header
        if entry.method or entry.flags & 1:
            raise FormatError(
                f"Entry {name!r} of {path.name} is compressed or encrypted; torch stores entries as they "
                "are. Unpack the archive and save it again with torch.save.",
                file=str(path),
            )
        # A damaged directory can point before the beginning or past the end.
        header = headers.read(at) if begin <= at < size else b""
        if len(header) < LOCAL.size or not header.startswith(b"PK\x03\x04") or name in records:
            raise CorruptCheckpointError(
                f"The local header of entry {name!r} of {path.name} is damaged.", file=str(path), offset=at
            )
        name_length, extra_length = LOCAL.unpack(header)[-2:]
        offset = at + LOCAL.size + name_length + extra_length
        if offset + entry.nbytes > size:
            raise CorruptCheckpointError(
                f"Entry {name!r} of {path.name} reaches past the end of the file.", file=str(path), offset=offset
            )
        # torch.serialization.set_crc32_options(False) stores 0 for "not computed".
        crc = entry.crc32 if entry.crc32 or entry.nbytes == 0 else None
        central, descriptor = start + entry.at, bool(entry.flags & _DESCRIPTOR)
        records[name] = ZipRecord(name, offset, entry.nbytes, crc, at, central, descriptor)
        last, ordered = offset + entry.nbytes, ordered and at >= last
    if not ordered:
        _check_disjoint(path, records)
    return records


class _Headers:
    """Reads local headers up to the end of an archive: many at once where they are near each other, and in order."""

    def __init__(self, source: int, end: int, near: bool) -> None:
        self._source, self._end, self._near = source, end, near
        self._first, self._block = 0, b""
        self._reach = 0  # blocks never overlap, so together they are at most as large as the file

    def read(self, at: int) -> bytes:
        begin = at - self._first
        if not 0 <= begin <= len(self._block) - LOCAL.size:
            ahead = self._near and at >= self._reach
            self._block = read_at(self._source, min(_BLOCK if ahead else LOCAL.size, self._end - at), at)
            self._first, begin = at, 0
            self._reach = max(self._reach, at + len(self._block))
        return self._block[begin : begin + LOCAL.size]


def _check_disjoint(path: Path, records: Mapping[str, ZipRecord]) -> None:
    for one, two in itertools.pairwise(sorted(records.values(), key=lambda record: record.header)):
        if one.offset + one.nbytes > two.header:
            raise CorruptCheckpointError(
                f"Entry {two.name!r} of {path.name} overlaps entry {one.name!r}.", file=str(path), offset=two.header
            )


def _read_directory(source: int, begin: int, end: int) -> tuple[int, bytes]:
    """Return where the central directory of an archive begins in the file, and its bytes."""
    first, tail, at = _end_record(source, begin, end)
    _, _, _, _, count, size, start, _ = END.unpack_from(tail, at)
    stop = first + at
    if at >= LOCATOR.size and tail.startswith(b"PK\x06\x07", at - LOCATOR.size):
        position = begin + LOCATOR.unpack_from(tail, at - LOCATOR.size)[2]
        record = read_at(source, END64.size, position) if position <= stop - LOCATOR.size - END64.size else b""
        if not record.startswith(b"PK\x06\x06"):
            raise ValueError("its zip64 end record is damaged")
        *_, count, size, start = END64.unpack(record)
        stop = position
    if begin + start + size != stop or CENTRAL.size * count > size:
        raise ValueError(f"it does not lie where its end record says, at byte {start}")
    directory = read_at(source, size, begin + start)
    if len(directory) != size:
        raise ValueError("it is truncated")
    return begin + start, directory


def _end_record(source: int, begin: int, end: int) -> tuple[int, bytes, int]:
    """Return the offset of an archive's last bytes in the file, the bytes, and the offset of the end record in them."""
    for span in (_TAIL, _TAIL + 0xFFFF):  # at the very end, unless the archive has a comment
        first = max(begin, end - span)
        tail = read_at(source, max(end - first, 0), first)
        at = tail.rfind(b"PK\x05\x06")
        if at >= 0 and len(tail) == end - first and len(tail) - at >= END.size:
            comment = END.unpack_from(tail, at)[-1]
            if at + END.size + comment == len(tail):
                return first, tail, at
    raise ValueError("it has no end record")


class _DirectoryEntry(NamedTuple):
    at: int
    name: str
    flags: int
    method: int
    crc32: int
    nbytes: int
    header: int


def _entries(directory: bytes) -> Iterator[_DirectoryEntry]:
    at = 0
    while at < len(directory):
        values = CENTRAL.unpack_from(directory, at)
        signature, _, _, flags, method, _, _, crc, packed, nbytes, name_length, extra_length, comment, *_, header = (
            values
        )
        name_at = at + CENTRAL.size
        following = name_at + name_length + extra_length + comment
        if signature != b"PK\x01\x02" or following > len(directory):
            raise ValueError(f"its entry at byte {at} is damaged")
        if IN_ZIP64 in (packed, nbytes, header):
            extra = directory[name_at + name_length : following - comment]
            packed, nbytes, header = _zip64_values(extra, packed, nbytes, header)
        name = directory[name_at : name_at + name_length].decode("utf-8" if flags & UTF8 else "cp437")
        if packed != nbytes and method == 0:
            raise ValueError(f"entry {name!r} has two sizes")
        yield _DirectoryEntry(at, name, flags, method, crc, nbytes, header)
        at = following


def _zip64_values(extra: bytes, packed: int, nbytes: int, header: int) -> tuple[int, int, int]:
    # The field holds, in this order, the values that do not fit into 32 bits.
    at, values = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = extra[at + 4 : at + 4 + length]
        at += 4 + length
    numbers = iter(struct.unpack_from(f"<{len(values) // 8}Q", values))
    given = [next(numbers, None) if value == IN_ZIP64 else value for value in (nbytes, packed, header)]
    if any(value is None for value in given):
        raise ValueError("a zip64 field is too short")
    nbytes, packed, header = (value or 0 for value in given)
    return packed, nbytes, header
