"""Stored (uncompressed) zip archives: where the data of each entry lies, and how to write one with known offsets.

Structures are those of PKWARE's APPNOTE.TXT, sections 4.3 and 4.5.3 (zip64):
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = ["Placement", "ZipRecord", "central_directory", "local_header", "place", "read_records"]

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")

_LIMIT_32 = 0xFFFFFFFF  # from here on a 32-bit field says "see zip64"
_LIMIT_16 = 0xFFFF
_UTF8 = 0x800
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


def read_records(path: Path, begin: int = 0, end: int | None = None) -> dict[str, ZipRecord]:
    """Return the entries of an archive by name, reading only its directory and local headers.

    Args:
        path: The file.
        begin: Where the archive begins, in bytes, if it is only part of the file.
        end: Where it ends; at the end of the file by default.

    Raises:
        CorruptCheckpointError: The archive is truncated or its directory is damaged.
        FormatError: An entry is compressed, or encrypted.
    """
    size = path.stat().st_size if end is None else end
    try:
        with path.open("rb") as whole, zipfile.ZipFile(_Window(whole, begin, size)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, struct.error, ValueError, UnicodeDecodeError, NotImplementedError) as error:
        raise CorruptCheckpointError(
            f"{path.name} is truncated or damaged: its zip directory cannot be read ({error}).", file=str(path)
        ) from error
    records = {}
    with path.open("rb", buffering=0) as file:
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise FormatError(
                    f"Entry {info.filename!r} of {path.name} is compressed or encrypted; torch stores entries as they "
                    "are. Unpack the archive and save it again with torch.save.",
                    file=str(path),
                )
            # A damaged directory can point before the beginning or past the end.
            at = begin + info.header_offset
            header = os.pread(file.fileno(), _LOCAL.size, at) if begin <= at < size else b""
            if len(header) < _LOCAL.size or not header.startswith(b"PK\x03\x04"):
                raise CorruptCheckpointError(
                    f"The local header of entry {info.filename!r} of {path.name} is damaged.",
                    file=str(path),
                    offset=at,
                )
            name_length, extra_length = _LOCAL.unpack(header)[-2:]
            offset = at + _LOCAL.size + name_length + extra_length
            if offset + info.file_size > size:
                raise CorruptCheckpointError(
                    f"Entry {info.filename!r} of {path.name} reaches past the end of the file.",
                    file=str(path),
                    offset=offset,
                )
            # torch.serialization.set_crc32_options(False) stores 0 for "not computed".
            crc = info.CRC if info.CRC or info.file_size == 0 else None
            records[info.filename] = ZipRecord(info.filename, offset, info.file_size, crc)
    return records


class _Window(io.RawIOBase):
    """Part of a file, seen as a file."""

    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._begin, self._end = file, begin, end
        self._position = begin

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: self._begin, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        if origin + offset < self._begin:
            raise ValueError("negative seek position")
        self._position = origin + offset
        return self.tell()

    def tell(self) -> int:
        return self._position - self._begin

    def read(self, size: int = -1) -> bytes:
        left = max(self._end - self._position, 0)
        data = os.pread(self._file.fileno(), left if size < 0 else min(size, left), self._position)
        self._position += len(data)
        return data


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
