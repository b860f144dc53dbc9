"""Writes stored (uncompressed) zip archives whose entries lie where it was planned."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from mmfsdp.checkpoint.formats.zip_archive import CENTRAL, END, END64, IN_ZIP64, LOCAL, LOCATOR, UTF8

__all__ = ["Placement", "central_directory", "local_header", "place"]

_LIMIT_32 = 0xFFFFFFFF  # from here on a 32-bit field says "see zip64"
_LIMIT_16 = 0xFFFF
_DATE = 0x21  # 1980-01-01, the earliest date a zip can say: the same content gives the same bytes
_ALIGNMENT = 64  # bytes; torch aligns every record so, which mmap=True profits from


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


def place(name: str, header: int, nbytes: int) -> Placement:
    """Return where the data of an entry goes whose local header begins at byte ``header``."""
    unpadded = header + LOCAL.size + len(name.encode()) + len(_zip64_sizes(nbytes))
    padding = -unpadded % _ALIGNMENT
    if 0 < padding < 4:  # an extra field takes at least four bytes
        padding += _ALIGNMENT
    return Placement(name, header, unpadded + padding, nbytes)


def local_header(placed: Placement, crc32: int) -> bytes:
    """Return the local header of an entry; it fills the file from ``placed.header`` to ``placed.offset``."""
    name = placed.name.encode()
    extra = _zip64_sizes(placed.nbytes)
    padding = placed.offset - placed.header - LOCAL.size - len(name) - len(extra)
    if padding:
        # The same private extra field, 'FB', that torch's own writer pads with (caffe2/serialize/inline_container.cc).
        extra += struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
    large = placed.nbytes >= _LIMIT_32
    size, version = (IN_ZIP64, 45) if large else (placed.nbytes, 20)
    fields = (b"PK\x03\x04", version, UTF8, 0, 0, _DATE, crc32, size, size, len(name), len(extra))
    return LOCAL.pack(*fields) + name + extra


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
        tail += END64.pack(b"PK\x06\x06", END64.size - 12, 45, 45, 0, 0, count, count, size, start)
        tail += LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        count, size, start = 0xFFFF, IN_ZIP64, IN_ZIP64
    tail += END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0)
    return directory + tail


def _zip64_sizes(nbytes: int) -> bytes:
    return struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT_32 else b""


def _central_entry(placed: Placement, crc32: int) -> bytes:
    name = placed.name.encode()
    size, header = placed.nbytes, placed.header
    values = b""
    if size >= _LIMIT_32:
        values += struct.pack("<QQ", size, size)
        size = IN_ZIP64
    if header >= _LIMIT_32:
        values += struct.pack("<Q", header)
        header = IN_ZIP64
    extra = struct.pack("<HH", 1, len(values)) + values if values else b""
    version = 45 if values else 20
    fields = (b"PK\x01\x02", version, version, UTF8, 0, 0, _DATE, crc32, size, size)
    return CENTRAL.pack(*fields, len(name), len(extra), 0, 0, 0, 0, header) + name + extra
