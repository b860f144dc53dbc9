"""Reads the zip files of ``torch.save`` (``.pth``, ``.pt``) into a layout, without torch and without reading data.

An archive holds ``<root>/data.pkl`` (a pickle whose persistent ids name storages), ``<root>/byteorder`` and one record
``<root>/data/<key>`` per storage: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.checksums import crc32
from mmfsdp.checkpoint.formats.pickled_tensors import PickledShards, PickledTensor, Storage, StorageClass, TensorBuilder
from mmfsdp.checkpoint.formats.registry import Source
from mmfsdp.checkpoint.formats.zip_archive import ZipRecord, read_records
from mmfsdp.checkpoint.layout import Layout, Record, TensorEntry, TensorRef
from mmfsdp.checkpoint.pickles.unpickling import read_pickle
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = ["read", "read_archive", "read_tree", "whole_layout"]


def read(source: Source) -> Layout:
    """Read the layout of a ``.pth`` or ``.pt`` file.

    Raises:
        FormatError: It is a zip archive but not a checkpoint, or a single rank's part of a ``local`` checkpoint.
        UnsafePickleError: It names something that is not on the list of safe names.
        CorruptCheckpointError: It is damaged.
    """
    return whole_layout(source.path, "torch_zip", read_tree(source.path, trust=source.trust))


def whole_layout(path: Path, kind: str, content: Any) -> Layout:
    """Return the layout of a file whose tensors are whole.

    Args:
        path: The file.
        kind: Name of its format.
        content: Its nested content, with a ``PickledTensor`` for each tensor.

    Raises:
        FormatError: It is a single rank's part of a ``local`` checkpoint.
    """
    if isinstance(content, dict) and "mmfsdp" in content:
        raise _one_of_many(path)
    tensors: dict[str, TensorEntry] = {}

    def bind(name: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledShards):
            raise _one_of_many(path)
        if not isinstance(leaf, PickledTensor):
            return leaf
        unique = unique_name(name, tensors)
        chunk = leaf.chunk((0,) * len(leaf.shape))
        tensors[unique] = TensorEntry(unique, leaf.dtype, leaf.shape, (chunk,))
        return TensorRef(unique, leaf.parameter)

    tree = map_leaves(content, bind)
    return Layout(path, kind, 1, tensors, tree)


def read_tree(path: Path, *, trust: bool = False) -> Any:
    """Return the nested content of a ``.pth`` file with each tensor replaced by a ``PickledTensor``.

    Args:
        path: The file.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.

    Raises:
        FormatError, UnsafePickleError, CorruptCheckpointError: See `read`.
    """
    with path.open("rb", buffering=0) as file:
        return read_archive(path, file.fileno(), read_records(path, source=file.fileno()), trust=trust)


def read_archive(path: Path, source: int, records: Mapping[str, ZipRecord], *, trust: bool = False) -> Any:
    """Return the nested content of an archive, which may be only part of a file; see ``read_tree``.

    Args:
        path: The file.
        source: Its descriptor.
        records: The entries of the archive.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.
    """
    pickled = [name for name in records if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(pickled) != 1:
        raise FormatError(
            f"{path.name} is a zip archive but not a file of torch.save: it has no data.pkl.", file=str(path)
        )
    root = pickled[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in records:
        raise FormatError(
            f"{path.name} is a TorchScript archive. Save the state dict of the module instead.", file=str(path)
        )
    byteorder = records.get(f"{root}byteorder")
    if byteorder is not None and _read(path, source, byteorder) != b"little":
        raise FormatError(f"{path.name} was written on a big-endian machine.", file=str(path))

    def storage(pid: Any) -> Storage:
        return _storage(path, root, records, pid)

    return read_pickle(
        _read(path, source, records[pickled[0]]),
        file=path,
        trust=trust,
        functions=TensorBuilder(path).functions(),
        persistent=storage,
    )


def _read(path: Path, source: int, record: ZipRecord) -> bytes:
    data = os.pread(source, record.nbytes, record.offset)
    if len(data) != record.nbytes or record.crc32 not in (None, crc32(data)):
        raise CorruptCheckpointError(
            f"Entry {record.name!r} of {path.name} is damaged: its CRC-32 does not match.",
            file=str(path),
            offset=record.offset,
        )
    return data


def _storage(path: Path, root: str, records: Mapping[str, ZipRecord], pid: Any) -> Storage:
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], StorageClass)):
        raise FormatError(f"{path.name} refers to a storage of an unknown kind.", file=str(path))
    _, kind, key, _, _ = pid
    record = records.get(f"{root}data/{key}")
    if record is None:
        raise CorruptCheckpointError(
            f"{path.name} lacks the data of storage {key!r}: there is no entry 'data/{key}'.",
            file=str(path),
        )
    return Storage(kind.dtype, Record(path, record.offset, record.nbytes, record.crc32))


def _one_of_many(path: Path) -> FormatError:
    return FormatError(
        f"{path.name} is one rank's part of a sharded checkpoint; open its directory {str(path.parent)!r} instead.",
        file=str(path),
    )
