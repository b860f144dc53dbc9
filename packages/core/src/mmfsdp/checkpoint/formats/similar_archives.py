"""Recognises archives that differ from one already read in nothing but their data: a model has few distinct shapes.

A DCP file holds one archive per tensor. What surrounds the data (headers, pickle, directory) is the same for all
tensors of one shape and dtype, apart from the data's checksum and an identifier. Equal bytes need no second parse.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.checkpoint.formats.pickled_tensors import PickledTensor
from mmfsdp.checkpoint.formats.zip_archive import CENTRAL_CRC, DESCRIPTOR_CRC, LOCAL_CRC, ZipRecord
from mmfsdp.checkpoint.layout import Record

__all__ = ["SimilarArchives"]

_AT_ONCE = 16 << 10  # bytes; shorter archives are read whole
_EDGE = 64 << 10  # bytes; what has more around its data is no archive of one tensor
_KNOWN = 4096  # archives that are remembered
_IDENTIFIER = "/.data/serialization_id"  # a hash of the data


@dataclass(frozen=True, slots=True)
class _Anatomy:
    """Where the data of an archive lies, and what else may differ, in bytes from its beginning."""

    data: int
    end: int
    crc: int
    differing: tuple[tuple[int, int], ...]


class SimilarArchives:
    """Remembers archives that hold one tensor each, and answers for others that equal them but for their data."""

    def __init__(self) -> None:
        self._known: dict[int, dict[_Anatomy, dict[bytes, PickledTensor]]] = {}
        self._count = 0

    def find(self, source: int, path: Path, begin: int, end: int) -> PickledTensor | None:
        """Return the tensor of an archive if one that was remembered equals it, and ``None`` otherwise.

        Args:
            source: Descriptor of the file.
            path: The file.
            begin: Where the archive begins, in bytes.
            end: Where it ends.
        """
        for anatomy, archives in self._known.get(end - begin, {}).items():
            edges, crc = _edges(source, begin, end, anatomy)
            like = archives.get(edges)
            if like is not None:
                shift = begin + anatomy.data - like.record.offset
                record = Record(path, begin + anatomy.data, like.record.nbytes, crc if like.record.nbytes else 0)
                return PickledTensor(like.dtype, like.shape, like.offset + shift, like.strides, record, like.parameter)
        return None

    def remember(
        self, source: int, begin: int, end: int, records: Mapping[str, ZipRecord], tensor: PickledTensor
    ) -> None:
        """Remember an archive that was read in full.

        Args:
            source: Descriptor of the file.
            begin: Where the archive begins, in bytes.
            end: Where it ends.
            records: Its entries.
            tensor: What it holds.
        """
        held = [record for record in records.values() if record.offset == tensor.record.offset and record.nbytes]
        if len(held) != 1 or self._count >= _KNOWN:
            return
        data = held[0]
        if data.offset - begin > _EDGE or end - data.offset - data.nbytes > _EDGE:
            return
        differing = []
        for record in records.values():
            if record is data or record.name.endswith(_IDENTIFIER):
                places = [record.header + LOCAL_CRC, record.central + CENTRAL_CRC]
                places += [record.offset + record.nbytes + DESCRIPTOR_CRC] * record.descriptor
                differing += [(place - begin, 4) for place in places]
            if record is not data and record.name.endswith(_IDENTIFIER):
                differing.append((record.offset - begin, record.nbytes))
        first, last = data.offset - begin, data.offset - begin + data.nbytes
        # Only outside of the data: nothing else is read again, or compared.
        differing = [(at, count) for at, count in differing if at + count <= first or last <= at]
        anatomy = _Anatomy(first, last, data.central + CENTRAL_CRC - begin, tuple(differing))
        alike = self._known.setdefault(end - begin, {})
        alike.setdefault(anatomy, {})[_edges(source, begin, end, anatomy)[0]] = tensor
        self._count += 1


def _edges(source: int, begin: int, end: int, anatomy: _Anatomy) -> tuple[bytes, int | None]:
    """Return what surrounds the data, without what may differ, and the data's CRC-32."""
    gap = anatomy.end - anatomy.data
    if end - begin <= _AT_ONCE:
        edges = bytearray(os.pread(source, end - begin, begin))
        del edges[anatomy.data : anatomy.end]
    else:
        edges = bytearray(os.pread(source, anatomy.data, begin))
        edges += os.pread(source, end - begin - anatomy.end, begin + anatomy.end)
    if len(edges) != end - begin - gap:  # the file has become shorter
        return b"", None
    crc = struct.unpack_from("<L", edges, anatomy.crc - gap)[0]
    for at, count in anatomy.differing:
        at -= gap if at >= anatomy.end else 0
        edges[at : at + count] = bytes(count)
    return bytes(edges), crc or None
