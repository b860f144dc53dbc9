"""Writes a ``.pth`` file that ``torch.load`` reads with ``weights_only=True`` and ``mmap=True``, without torch."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mmfsdp.checkpoint.casting import CastEntry
from mmfsdp.checkpoint.copying import Copier, Progress
from mmfsdp.checkpoint.formats.stored_tensors import STORAGE_CLASSES
from mmfsdp.checkpoint.formats.zip_archive import Placement, central_directory, local_header, place
from mmfsdp.checkpoint.layout import TensorEntry, TensorRef, row_major_strides
from mmfsdp.checkpoint.pickling import PickleWriter
from mmfsdp.checkpoint.tree import select_tensors

__all__ = ["distinct_bytes", "write_torch_zip"]

_ROOT = "archive"


def write_torch_zip(
    path: Path,
    tree: Any,
    tensors: Mapping[str, TensorEntry],
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> int:
    """Write a tree as torch would save it, copying tensor data in constant memory.

    Tensors are written whole and packed in row-major order. Names that share all their bytes in the source (tied
    weights) share one storage in the target; views that overlap in part get storages of their own.

    Args:
        path: The file to create; it must not exist.
        tree: Nested content with a ``TensorRef`` for each tensor.
        tensors: The tensors that the tree refers to.
        verify: Check the stored CRC-32 of every source record.
        progress: Called with the bytes copied so far and their total.

    Returns:
        Bytes of tensor data written.

    Raises:
        FormatError: The tree holds an object that cannot be pickled here.
        CorruptCheckpointError: Source data does not match its checksum.
    """
    storages = _storages(tree, tensors)
    content: dict[str, bytes | TensorEntry] = {
        f"{_ROOT}/data.pkl": _pickle(tree, tensors, storages),
        f"{_ROOT}/byteorder": b"little",
    }
    for storage in storages.values():
        content.setdefault(f"{_ROOT}/data/{storage.key}", storage.entry)
    content[f"{_ROOT}/version"] = b"3\n"

    placements: dict[str, Placement] = {}
    end = 0
    for name, value in content.items():
        placements[name] = place(name, end, len(value) if isinstance(value, bytes) else value.nbytes)
        end = placements[name].end
    total = sum(value.nbytes for value in content.values() if isinstance(value, TensorEntry))
    with path.open("xb", buffering=0) as file:
        os.ftruncate(file.fileno(), end)
        crcs: dict[str, int] = {}
        with Copier(file.fileno(), total=total, verify=verify, progress=progress) as copier:
            for name, value in content.items():
                placed = placements[name]
                if isinstance(value, bytes):
                    crcs[name] = zlib.crc32(value)
                    _write(file, placed.offset, value)
                else:
                    crcs[name] = copier.copy_tensor(value, placed.offset)
                # Only now is the checksum known that the header in front of the data holds.
                _write(file, placed.header, local_header(placed, crcs[name]))
        _write(file, end, central_directory(placements, crcs, end))
    return total


def distinct_bytes(tree: Any, tensors: Mapping[str, TensorEntry]) -> int:
    """Return the bytes of tensor data that a tree takes when names that share their bytes are written once."""
    return sum({storage.key: storage.entry.nbytes for storage in _storages(tree, tensors).values()}.values())


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    entry: TensorEntry


def _storages(tree: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, _Storage]:
    """Number the storages of the target; names with the same source bytes get the same one."""
    by_name: dict[str, _Storage] = {}
    by_source: dict[object, _Storage] = {}
    for name in select_tensors(tree):
        entry = tensors[name]
        source: object = name  # an empty tensor shares nothing
        # Bytes that are seen as two dtypes are no longer the same once they are cast.
        dtypes = (entry.dtype, entry.source.dtype if isinstance(entry, CastEntry) else entry.dtype)
        if entry.nbytes and len(entry.chunks) == 1 and entry.chunks[0].strides is None:
            # Whatever its shape: `weight` and `weight.view(-1)` are one storage.
            source = (dtypes, entry.chunks[0].file, entry.chunks[0].offset, entry.nbytes)
        elif entry.nbytes:
            source = (dtypes, entry.shape, entry.chunks)
        by_name[name] = by_source.setdefault(source, _Storage(str(len(by_source)), entry))
    return by_name


def _pickle(tree: Any, tensors: Mapping[str, TensorEntry], storages: Mapping[str, _Storage]) -> bytes:
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
            writer.name("torch", entry.dtype)
        writer.raw(b"tR")
        if ref.parameter is not None:
            writer.save(ref.parameter)
            writer.reduce("collections", "OrderedDict", ())
            writer.raw(b"tR")

    return PickleWriter(write_tensor).dumps(tree)


def _write(file: BinaryIO | Any, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file.fileno(), view, offset)
        view, offset = view[count:], offset + count
