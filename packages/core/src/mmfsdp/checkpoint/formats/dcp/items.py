"""Locates the stored items of a DCP directory: archives or safetensors within its ``.distcp`` files.

A file holds one archive per tensor. What surrounds the data (headers, pickle, directory) is the same for all tensors of
one shape and dtype, apart from the data's checksum and an identifier, and a model has few distinct shapes: an archive
with the bytes of one already read needs no second parse (docs/adr/0006-mechanisms-removed-and-kept.md).
"""

from __future__ import annotations

import itertools
import math
import struct
import threading
import weakref
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.descriptors import is_remote, prefetch, read_at
from mmfsdp.checkpoint.chunks import Chunk, Record
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.formats.common.source import looks_like_safetensors
from mmfsdp.checkpoint.formats.safetensors.safetensors_files import box_offsets, read_entries
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor, read_archive
from mmfsdp.checkpoint.formats.torch_files.zip_archive import (
    CENTRAL_CRC,
    DESCRIPTOR_CRC,
    LOCAL_CRC,
    ZipRecord,
    read_records,
)
from mmfsdp.checkpoint.integrity import inside, regular_files
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError, UnsafePickleError

__all__ = ["DcpItems", "Location", "Locations"]

_AT_ONCE = 16 << 10  # bytes; shorter archives are read whole
_ITEMS = 512  # items of a file on a server that are looked at together
_SURROUNDING = 4096  # bytes before and after the data of an item that torch.save writes, and some more
_EDGE = 64 << 10  # bytes; what has more around its data is no archive of one tensor
_KNOWN = 4096  # archives that are remembered
_IDENTIFIER = "/.data/serialization_id"  # a hash of the data
_STRIDED = (
    " Up to torch 2.9, DCP writes only one rank's part of a tensor that a rank holds in several pieces (_StridedShard, "
    "such as a fused projection under tensor parallelism), and the other parts are lost. If this tensor was sharded "
    "so, save it again with such tensors redistributed to Shard or Replicate first."
)


class Location(NamedTuple):
    """The location of one stored item."""

    file: str
    """Path relative to the directory, as written."""
    offset: int
    """First byte in the file."""
    length: int
    """Number of bytes."""


Locations = Mapping[tuple[str, tuple[int, ...] | None], Location]
"""Flat name and offsets of the chunk (``None`` for an object) to where it is stored."""


class DcpItems:
    """The stored items of a DCP directory. Files that were read from stay open as long as this is in use.

    Args:
        directory: The directory.
        locations: Where its metadata says that each item lies.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.

    Raises:
        IncompleteCheckpointError: A file is missing.
        CorruptCheckpointError: An item reaches past the end of its file, or into another item.
        FormatError: A file is outside of the directory.
    """

    def __init__(self, directory: Path, locations: Locations, trust: bool) -> None:
        self._directory, self._trust = directory, trust
        self._files: dict[str, Path] = {}
        self._prepare()
        self._remote = _RemoteItems(locations) if is_remote(directory) else None
        sizes: dict[str, int] = {}
        regular = regular_files(directory) if locations else frozenset()
        for (name, _), location in locations.items():
            if location.file not in self._files:
                path = directory / location.file
                if location.file not in regular:
                    path = inside(directory, location.file, directory / ".metadata")
                if not path.is_file():
                    raise IncompleteCheckpointError(
                        f"{location.file}, which holds {name!r}, is missing.", file=str(path)
                    )
                self._files[location.file], sizes[location.file] = path, path.stat().st_size
        self._check_extents(locations, sizes)

    def _prepare(self) -> None:
        self._open = OpenFiles()
        weakref.finalize(self, self._open.close)
        self._lock = threading.Lock()
        self._found: dict[tuple[str, Bounds], Chunk] = {}
        self._similar = _SimilarArchives()
        self._appended: dict[tuple[Path, int], dict[str, tuple[TensorEntry, tuple[int, ...]]]] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        # One rank reads the metadata and sends the others the locations of what they need.
        return self._directory, self._trust

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._directory, self._trust = state
        self._files = {}
        self._prepare()
        self._remote = None

    def chunks(self, name: str, dtype: str, boxes: Mapping[Bounds, Location]) -> tuple[Chunk, ...]:
        """Locate the chunk of each box of a tensor, and remember it. Threads may call this at the same time.

        Args:
            name: Flat name of the tensor.
            dtype: The dtype that it should have.
            boxes: Its boxes, none of them empty, and where they are stored.

        Raises:
            CorruptCheckpointError, FormatError, UnsafePickleError, IncompleteCheckpointError: The file holds
                something else.
        """
        with self._lock:
            for box, where in boxes.items():
                if (name, box) not in self._found:
                    self._found[name, box] = self._chunk(name, dtype, box, where)
            return tuple(self._found[name, box] for box in boxes)

    def load(self, name: str, location: Location) -> Any:
        """Return the content of an archive: a ``PickledTensor``, or a value with such tensors in it.

        Raises:
            CorruptCheckpointError, FormatError, UnsafePickleError: It cannot be read.
        """
        path = self._path(location.file)
        begin, end = location.offset, location.offset + location.length
        source = self._open.descriptor(path)
        try:
            records = read_records(path, begin, end, source)
            content = read_archive(path, source, records, trust=self._trust)
        except (CorruptCheckpointError, FormatError, UnsafePickleError) as error:
            raise type(error)(f"{name!r}: {error.message}", **error.context) from error
        if isinstance(content, PickledTensor):
            self._similar.remember(source, begin, end, records, content)
        return content

    def _path(self, file: str) -> Path:
        if file not in self._files:
            self._files[file] = inside(self._directory, file, self._directory / ".metadata")
        return self._files[file]

    def _chunk(self, name: str, dtype: str, box: Bounds, location: Location) -> Chunk:
        path = self._path(location.file)
        begin, end = location.offset, location.offset + location.length
        if self._remote is not None:
            self._remote.prefetch(self._open.descriptor(path), location)
        known = self._similar.find(self._open.descriptor(path), path, begin, end)
        if known is not None:
            chunk, found = known.chunk(box[0]), known.dtype
        elif self._is_safetensors(path, location.offset):
            chunk, found = self._in_safetensors(path, name, box, location)
        else:
            stored = self.load(name, location)
            if not isinstance(stored, PickledTensor):
                raise CorruptCheckpointError(
                    f"{path.name} does not hold a tensor where {name!r} should be.",
                    file=str(path),
                    offset=location.offset,
                )
            chunk, found = stored.chunk(box[0]), stored.dtype
        if found != dtype or chunk.box_sizes != box[1]:
            smaller = found == dtype and len(box[1]) == len(chunk.box_sizes) and chunk.numel < math.prod(box[1])
            raise CorruptCheckpointError(
                f"{path.name} holds {found} of size {list(chunk.box_sizes)} for tensor {name!r} at {list(box[0])} "
                f"(expected {dtype} of size {list(box[1])}).{_STRIDED if smaller else ''}",
                file=str(path),
                offset=location.offset,
            )
        return chunk

    def _is_safetensors(self, path: Path, offset: int) -> bool:
        if (path, offset) in self._appended:
            return True
        return looks_like_safetensors(read_at(self._open.descriptor(path), 9, offset))

    def _in_safetensors(self, path: Path, name: str, box: Bounds, location: Location) -> tuple[Chunk, str]:
        key = path, location.offset
        if key not in self._appended:
            entries, metadata = read_entries(path, begin=location.offset)
            offsets = box_offsets(path, metadata)
            self._appended[key] = {item: (entry, offsets.get(item, ())) for item, entry in entries.items()}
        entry, offsets_found = self._appended[key].get(name, (None, ()))
        if entry is None or offsets_found != box[0]:
            # torch's writer keeps one box per name and file: a second one of a rank is lost when it is written.
            raise IncompleteCheckpointError(
                f"{path.name} lacks the box of tensor {name!r} at {list(box[0])}.",
                file=str(path),
                offset=location.offset,
            )
        chunk = entry.chunks()[0]
        return Chunk(path, chunk.offset, chunk.nbytes, box[0], chunk.box_sizes), entry.dtype

    def _check_extents(self, locations: Locations, sizes: Mapping[str, int]) -> None:
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for (name, _), location in locations.items():
            path, size = self._files[location.file], sizes[location.file]
            end = location.offset + location.length
            if end > size:
                raise CorruptCheckpointError(
                    f"{path.name} is truncated: {name!r} reaches to byte {end}, but the file has {size} bytes.",
                    file=str(path),
                    offset=location.offset,
                )
            by_file.setdefault(location.file, []).append((location.offset, end, name))
        for file, extents in by_file.items():
            path = self._files[file]
            for (begin, end, name), (other, _, neighbour) in itertools.pairwise(sorted(extents)):
                # The tensors of an appended safetensors file all name its beginning.
                if other < end and not (other == begin and self._is_safetensors(path, begin)):
                    raise CorruptCheckpointError(
                        f"{name!r} and {neighbour!r} overlap in {path.name}.", file=str(path), offset=other
                    )


class _RemoteItems:
    """Asks a server for the beginnings and ends of many items at once; alone, each would take a round trip."""

    def __init__(self, locations: Locations) -> None:
        self._order: dict[str, list[Location]] = {}
        for location in sorted({*locations.values()}):
            self._order.setdefault(location.file, []).append(location)
        self._asked: set[Location] = set()

    def prefetch(self, source: int, location: Location) -> None:
        """Ask for the bytes around the data of an item and of the items after it, unless that was done before."""
        if location in self._asked:
            return
        order = self._order[location.file]
        first = bisect_left(order, location)
        near = [item for item in order[first : first + _ITEMS] if item not in self._asked]
        self._asked.update(near)
        heads = [(item.offset, min(_SURROUNDING, item.length)) for item in near]
        tails = [(max(item.offset, item.offset + item.length - _SURROUNDING), _SURROUNDING) for item in near]
        prefetch(source, [*heads, *tails])


@dataclass(frozen=True, slots=True)
class _Anatomy:
    """The ranges of an archive that hold its data, and others that may differ, in bytes from its beginning."""

    data: int
    end: int
    crc: int
    differing: tuple[tuple[int, int], ...]


class _SimilarArchives:
    """Remembers archives of one tensor each, and answers for others that equal them but for their data.

    ``source`` is the descriptor of a file; ``begin`` and ``end`` say in bytes where an archive lies in it.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[_Anatomy, dict[bytes, PickledTensor]]] = {}
        self._count = 0

    def find(self, source: int, path: Path, begin: int, end: int) -> PickledTensor | None:
        """Return the tensor of an archive if it equals one seen before, and ``None`` otherwise."""
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
        """Remember an archive that was read in full."""
        held = [record for record in records.values() if record.offset == tensor.record.offset and record.nbytes]
        if len(held) != 1 or self._count >= _KNOWN:
            return
        data = held[0]
        if data.offset - begin > _EDGE or end - data.offset - data.nbytes > _EDGE:
            return
        differing = []
        for record in records.values():
            if record is data or record.name.endswith(_IDENTIFIER):
                offsets = [record.header + LOCAL_CRC, record.central + CENTRAL_CRC]
                offsets += [record.offset + record.nbytes + DESCRIPTOR_CRC] * record.descriptor
                differing += [(offset - begin, 4) for offset in offsets]
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
    """Return the bytes around the data, without those that may differ, and the data's CRC-32."""
    gap = anatomy.end - anatomy.data
    if end - begin <= _AT_ONCE:
        edges = bytearray(read_at(source, end - begin, begin))
        del edges[anatomy.data : anatomy.end]
    else:
        edges = bytearray(read_at(source, anatomy.data, begin))
        edges += read_at(source, end - begin - anatomy.end, begin + anatomy.end)
    if len(edges) != end - begin - gap:  # the file has become shorter
        return b"", None
    crc = struct.unpack_from("<L", edges, anatomy.crc - gap)[0]
    for at, count in anatomy.differing:
        at -= gap if at >= anatomy.end else 0
        edges[at : at + count] = bytes(count)
    return bytes(edges), crc or None
