"""Plans ``.pth`` files that ``torch.load`` reads with ``weights_only=True`` and ``mmap=True``, without torch."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmfsdp.basics.dtypes import torch_name
from mmfsdp.checkpoint.chunks import row_major_strides
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import CheckpointContent
from mmfsdp.checkpoint.formats.torch_files.torch_zip import STORAGE_CLASSES
from mmfsdp.checkpoint.formats.torch_files.zip_archive import CENTRAL, END, END64, IN_ZIP64, LOCAL, LOCATOR, UTF8
from mmfsdp.checkpoint.layout import Piece, PlannedFile, TensorRef
from mmfsdp.checkpoint.pickles.pickling import PickleWriter
from mmfsdp.checkpoint.tree import select_tensors

__all__ = ["Archive", "archive_of", "plan_archive", "plan_file", "plan_write"]

_LIMIT_32 = 0xFFFFFFFF  # from here on a 32-bit field says "see zip64"
_LIMIT_16 = 0xFFFF
_DATE = 0x21  # 1980-01-01, the earliest date a zip can say: the same content gives the same bytes
_ALIGNMENT = 64  # bytes; torch aligns every record so, which mmap=True profits from


_ROOT = "archive"


def plan_write(content: CheckpointContent) -> list[PlannedFile]:
    """Plan one ``.pth`` file; see `plan_archive`."""
    return [plan_file("", content.tree, content.tensors)]


def plan_file(name: str, tree: Any, tensors: Mapping[str, TensorEntry]) -> PlannedFile:
    """Plan a file that holds a tree as torch would save it; see ``plan_archive``."""
    return plan_archive(tree, tensors).as_file(name)


@dataclass(frozen=True)
class Archive:
    """One archive of ``torch.save``, which may be a whole file or part of one."""

    content: Mapping[str, bytes | TensorEntry]
    """Entry name to its data."""
    placements: Mapping[str, Placement]
    """Where each entry goes, from the start of the archive."""
    directory: int
    """Where the central directory goes, in bytes from the start of the archive."""
    size: int
    """Length in bytes."""

    def as_file(self, name: str) -> PlannedFile:
        """Return the file that holds this archive alone."""
        return PlannedFile(name, self.size, self.pieces(0), lambda crcs: self.blocks(0, crcs))

    def pieces(self, base: int) -> tuple[Piece, ...]:
        """Return the tensor data of an archive that begins at byte ``base`` of its file."""
        return tuple(
            Piece(value, base + self.placements[name].offset)
            for name, value in self.content.items()
            if isinstance(value, TensorEntry)
        )

    def blocks(self, base: int, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield everything else and where it goes."""
        given = iter(crcs)
        known: dict[str, int] = {}
        for name, value in self.content.items():
            placement = self.placements[name]
            known[name] = zlib.crc32(value) if isinstance(value, bytes) else next(given)
            yield base + placement.header, local_header(placement, known[name])
            if isinstance(value, bytes):
                yield base + placement.offset, value
        yield base + self.directory, central_directory(self.placements, known, self.directory)


def plan_archive(tree: Any, tensors: Mapping[str, TensorEntry]) -> Archive:
    """Plan an archive that holds a tree as torch would save it.

    Tensors are written whole and packed in row-major order. Names that share all their bytes in the source (tied
    weights) share one storage in the target; views that overlap in part get storages of their own.

    Raises:
        FormatError: The tree holds an object that cannot be pickled here.
    """
    storages = _storages(tree, tensors)
    by_key = {storage.key: storage.entry for storage in storages.values()}
    return archive_of(_pickle(tree, tensors, storages), by_key)


def archive_of(pickled: bytes, storages: Mapping[str, TensorEntry]) -> Archive:
    """Plan an archive that holds a pickle, and the storages that it names by their keys."""
    content: dict[str, bytes | TensorEntry] = {f"{_ROOT}/data.pkl": pickled, f"{_ROOT}/byteorder": b"little"}
    content |= {f"{_ROOT}/data/{key}": entry for key, entry in storages.items()}
    content[f"{_ROOT}/version"] = b"3\n"
    placements: dict[str, Placement] = {}
    end = 0
    for name, value in content.items():
        placements[name] = placement_of(name, end, len(value) if isinstance(value, bytes) else value.nbytes)
        end = placements[name].end
    size = end + len(central_directory(placements, dict.fromkeys(placements, 0), end))
    return Archive(content, placements, end, size)


@dataclass(frozen=True, slots=True)
class _SavedStorage:
    key: str
    entry: TensorEntry


def _storages(tree: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, _SavedStorage]:
    """Number the storages of the target; names with the same source bytes get the same one."""
    by_name: dict[str, _SavedStorage] = {}
    by_source: dict[object, _SavedStorage] = {}
    for name in select_tensors(tree):
        entry = tensors[name]
        source: object = entry.source_key() if entry.nbytes else name  # an empty tensor shares nothing
        by_name[name] = by_source.setdefault(source, _SavedStorage(str(len(by_source)), entry))
    return by_name


def _pickle(tree: Any, tensors: Mapping[str, TensorEntry], storages: Mapping[str, _SavedStorage]) -> bytes:
    def write_tensor(writer: PickleWriter, ref: TensorRef) -> None:
        entry = tensors[ref.name]
        typed = entry.dtype in STORAGE_CLASSES
        if ref.parameter is not None:
            writer.name("torch._utils", "_rebuild_parameter")
            writer.raw(b"(")
        writer.name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        writer.raw(b"((")
        writer.save("storage")
        if typed:
            writer.name("torch", STORAGE_CLASSES[entry.dtype])
        else:
            writer.name("torch.storage", "UntypedStorage")
        writer.save(storages[ref.name].key)
        writer.save("cpu")
        writer.save(entry.numel if typed else entry.nbytes)
        writer.raw(b"tQ")
        writer.save(0)
        writer.save(entry.shape)
        writer.save(row_major_strides(entry.shape))
        writer.save(False)
        writer.reduce("collections", "OrderedDict", ())
        if not typed:
            writer.name("torch", torch_name(entry.dtype))
        writer.raw(b"tR")
        if ref.parameter is not None:
            writer.save(ref.parameter)
            writer.reduce("collections", "OrderedDict", ())
            writer.raw(b"tR")

    return PickleWriter(write_tensor).dumps(tree)


@dataclass(frozen=True, slots=True)
class Placement:
    """The offsets of an entry in an archive to be written."""

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


def placement_of(name: str, header: int, nbytes: int) -> Placement:
    """Return the placement of an entry whose local header begins at byte ``header``."""
    unpadded = header + LOCAL.size + len(name.encode()) + len(_zip64_sizes(nbytes))
    padding = -unpadded % _ALIGNMENT
    if 0 < padding < 4:  # an extra field takes at least four bytes
        padding += _ALIGNMENT
    return Placement(name, header, unpadded + padding, nbytes)


def local_header(placement: Placement, crc32: int) -> bytes:
    """Return the local header of an entry; it fills the file from ``placement.header`` to ``placement.offset``."""
    name = placement.name.encode()
    extra = _zip64_sizes(placement.nbytes)
    padding = placement.offset - placement.header - LOCAL.size - len(name) - len(extra)
    if padding:
        # The same private extra field, 'FB', that torch's own writer pads with (caffe2/serialize/inline_container.cc).
        extra += struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
    large = placement.nbytes >= _LIMIT_32
    size, version = (IN_ZIP64, 45) if large else (placement.nbytes, 20)
    fields = (b"PK\x03\x04", version, UTF8, 0, 0, _DATE, crc32, size, size, len(name), len(extra))
    return LOCAL.pack(*fields) + name + extra


def central_directory(placements: Mapping[str, Placement], crcs: Mapping[str, int], start: int) -> bytes:
    """Return the central directory and the end records of an archive."""
    directory = b"".join(_central_entry(placement, crcs[name]) for name, placement in placements.items())
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


def _central_entry(placement: Placement, crc32: int) -> bytes:
    name = placement.name.encode()
    size, header = placement.nbytes, placement.header
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
