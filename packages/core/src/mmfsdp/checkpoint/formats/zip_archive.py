"""Stored (uncompressed) zip archives: where the data of each entry lies, and how to write one with known offsets.

Structures are those of PKWARE's APPNOTE.TXT, sections 4.3 and 4.5.3 (zip64):
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = [
    "CENTRAL_CRC",
    "DESCRIPTOR_CRC",
    "LOCAL_CRC",
    "Placement",
    "ZipRecord",
    "central_directory",
    "local_header",
    "place",
    "read_records",
]

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")

LOCAL_CRC = 14
"""Bytes from the beginning of a local header to its CRC-32."""
CENTRAL_CRC = 16
"""Bytes from the beginning of an entry of the central directory to its CRC-32."""
DESCRIPTOR_CRC = 4
"""Bytes from the end of the data to the CRC-32 of the descriptor that may follow it."""

_LIMIT_32 = 0xFFFFFFFF  # from here on a 32-bit field says "see zip64"
_LIMIT_16 = 0xFFFF
_IN_ZIP64 = 0xFFFFFFFF
_UTF8 = 0x800
_DESCRIPTOR = 0x8
_TAIL = 4096  # bytes: the end records, and all of a small archive's directory
_DATE = 0x21  # 1980-01-01, the earliest date a zip can say: the same content gives the same bytes
_ALIGNMENT = 64  # bytes; torch aligns every record so, which mmap=True profits from


@dataclass(frozen=True, slots=True)
class ZipRecord:
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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an entry of an archive to be written goes."""

    name: str
    """Its name in the archive."""
    header: int
    """Offset of its local header in bytes."""
    offset: int
    """Offset of its data in bytes, a multiple of 64."""
    nbytes: int
    """Length of its data in bytes."""

    @property
    def end(self) -> int:
        """Offset of the first byte after its data."""
        return self.offset + self.nbytes


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
    size = os.fstat(source).st_size if end is None else end
    try:
        start, directory = _read_directory(source, begin, size)
        entries = list(_entries(directory))
    except (struct.error, ValueError) as error:  # bytes that are no text are a ValueError
        raise CorruptCheckpointError(
            f"{path.name} is truncated or damaged: its zip directory cannot be read ({error}).", file=str(path)
        ) from error
    records: dict[str, ZipRecord] = {}
    last, ordered = begin, True
    for entry in entries:
        name, at = entry.name, begin + entry.header
        if entry.method or entry.flags & 1:
            raise FormatError(
                f"Entry {name!r} of {path.name} is compressed or encrypted; torch stores entries as they "
                "are. Unpack the archive and save it again with torch.save.",
                file=str(path),
            )
        # A damaged directory can point before the beginning or past the end.
        header = os.pread(source, _LOCAL.size, at) if begin <= at < size else b""
        if len(header) < _LOCAL.size or not header.startswith(b"PK\x03\x04") or name in records:
            raise CorruptCheckpointError(
                f"The local header of entry {name!r} of {path.name} is damaged.", file=str(path), offset=at
            )
        name_length, extra_length = _LOCAL.unpack(header)[-2:]
        offset = at + _LOCAL.size + name_length + extra_length
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


def _check_disjoint(path: Path, records: Mapping[str, ZipRecord]) -> None:
    for one, two in itertools.pairwise(sorted(records.values(), key=lambda record: record.header)):
        if one.offset + one.nbytes > two.header:
            raise CorruptCheckpointError(
                f"Entry {two.name!r} of {path.name} overlaps entry {one.name!r}.", file=str(path), offset=two.header
            )


def _read_directory(source: int, begin: int, end: int) -> tuple[int, bytes]:
    """Return where the central directory of an archive begins in the file, and its bytes."""
    first, tail, at = _end_record(source, begin, end)
    _, _, _, _, count, size, start, _ = _END.unpack_from(tail, at)
    stop = first + at
    if at >= _LOCATOR.size and tail.startswith(b"PK\x06\x07", at - _LOCATOR.size):
        place = begin + _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2]
        record = os.pread(source, _END64.size, place) if place <= stop - _LOCATOR.size - _END64.size else b""
        if not record.startswith(b"PK\x06\x06"):
            raise ValueError("its zip64 end record is damaged")
        *_, count, size, start = _END64.unpack(record)
        stop = place
    if begin + start + size != stop or _CENTRAL.size * count > size:
        raise ValueError(f"it does not lie where its end record says, at byte {start}")
    directory = os.pread(source, size, begin + start)
    if len(directory) != size:
        raise ValueError("it is truncated")
    return begin + start, directory


def _end_record(source: int, begin: int, end: int) -> tuple[int, bytes, int]:
    """Return the last bytes of an archive: where they begin in the file, they, and where its end record is in them."""
    for span in (_TAIL, _TAIL + 0xFFFF):  # at the very end, unless the archive has a comment
        first = max(begin, end - span)
        tail = os.pread(source, max(end - first, 0), first)
        at = tail.rfind(b"PK\x05\x06")
        if at >= 0 and len(tail) == end - first and len(tail) - at >= _END.size:
            comment = _END.unpack_from(tail, at)[-1]
            if at + _END.size + comment == len(tail):
                return first, tail, at
    raise ValueError("it has no end record")


@dataclass(frozen=True, slots=True)
class _Entry:
    at: int
    name: str
    flags: int
    method: int
    crc32: int
    nbytes: int
    header: int


def _entries(directory: bytes) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        (
            signature,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            packed,
            nbytes,
            name_length,
            extra_length,
            comment,
            _,
            _,
            _,
            header,
        ) = _CENTRAL.unpack_from(directory, at)
        name_at = at + _CENTRAL.size
        following = name_at + name_length + extra_length + comment
        if signature != b"PK\x01\x02" or following > len(directory):
            raise ValueError(f"its entry at byte {at} is damaged")
        if _IN_ZIP64 in (packed, nbytes, header):
            extra = directory[name_at + name_length : following - comment]
            packed, nbytes, header = _zip64_values(extra, packed, nbytes, header)
        name = directory[name_at : name_at + name_length].decode("utf-8" if flags & _UTF8 else "cp437")
        if packed != nbytes and method == 0:
            raise ValueError(f"entry {name!r} has two sizes")
        yield _Entry(at, name, flags, method, crc, nbytes, header)
        at = following


def _zip64_values(extra: bytes, packed: int, nbytes: int, header: int) -> tuple[int, int, int]:
    # The field holds, in this order, those of the values that do not fit into 32 bits.
    at, values = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = extra[at + 4 : at + 4 + length]
        at += 4 + length
    numbers = iter(struct.unpack_from(f"<{len(values) // 8}Q", values))
    given = [next(numbers, None) if value == _IN_ZIP64 else value for value in (nbytes, packed, header)]
    if any(value is None for value in given):
        raise ValueError("a zip64 field is too short")
    nbytes, packed, header = (value or 0 for value in given)
    return packed, nbytes, header


def place(name: str, header: int, nbytes: int) -> Placement:
    """Return where the data of an entry goes whose local header begins at byte ``header``."""
    unpadded = header + _LOCAL.size + len(name.encode()) + len(_zip64_sizes(nbytes))
    padding = -unpadded % _ALIGNMENT
    if 0 < padding < 4:  # an extra field takes at least four bytes
        padding += _ALIGNMENT
    return Placement(name, header, unpadded + padding, nbytes)


def local_header(placed: Placement, crc32: int) -> bytes:
    """Return the local header of an entry; it fills the file from ``placed.header`` to ``placed.offset``."""
    name = placed.name.encode()
    extra = _zip64_sizes(placed.nbytes)
    padding = placed.offset - placed.header - _LOCAL.size - len(name) - len(extra)
    if padding:
        # The same private extra field, 'FB', that torch's own writer pads with (caffe2/serialize/inline_container.cc).
        extra += struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
    large = placed.nbytes >= _LIMIT_32
    size, version = (0xFFFFFFFF, 45) if large else (placed.nbytes, 20)
    fields = (b"PK\x03\x04", version, _UTF8, 0, 0, _DATE, crc32, size, size, len(name), len(extra))
    return _LOCAL.pack(*fields) + name + extra


def central_directory(placements: Mapping[str, Placement], crcs: Mapping[str, int], start: int) -> bytes:
    """Return the central directory and the end records of an archive.

    Args:
        placements: The entries by name, in file order.
        crcs: CRC-32 of the data of each.
        start: Offset in bytes at which the directory will be written.
    """
    directory = b"".join(_central_entry(placed, crcs[name]) for name, placed in placements.items())
    count, size = len(placements), len(directory)
    tail = b""
    if count >= _LIMIT_16 or start >= _LIMIT_32 or size >= _LIMIT_32:
        tail += _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
        tail += _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        count, size, start = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    tail += _END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0)
    return directory + tail


def _zip64_sizes(nbytes: int) -> bytes:
    return struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT_32 else b""


def _central_entry(placed: Placement, crc32: int) -> bytes:
    name = placed.name.encode()
    size, header = placed.nbytes, placed.header
    values = b""
    if size >= _LIMIT_32:
        values += struct.pack("<QQ", size, size)
        size = 0xFFFFFFFF
    if header >= _LIMIT_32:
        values += struct.pack("<Q", header)
        header = 0xFFFFFFFF
    extra = struct.pack("<HH", 1, len(values)) + values if values else b""
    version = 45 if values else 20
    fields = (b"PK\x01\x02", version, version, _UTF8, 0, 0, _DATE, crc32, size, size)
    return _CENTRAL.pack(*fields, len(name), len(extra), 0, 0, 0, 0, header) + name + extra
