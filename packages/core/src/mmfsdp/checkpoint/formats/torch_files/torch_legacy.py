"""Reads files of ``torch.save`` before version 1.6: pickles one after the other, then the storages.

In the file follow each other a magic number, the protocol version, facts about the machine, the content (a pickle whose
persistent ids name storages), the keys of the storages, and for each key eight bytes of length in elements and its
data: https://github.com/pytorch/pytorch/blob/main/torch/serialization.py (``_legacy_save``).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mmfsdp.basics.descriptors import prefetch
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.chunks import Record
from mmfsdp.checkpoint.formats.common.source import SourcePath
from mmfsdp.checkpoint.formats.torch_files.torch_zip import Storage, StorageClass, TensorBuilder, whole_layout
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.pickles.unpickling import StandIn, read_pickle
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = ["read"]

_PROTOCOL_VERSION = 1001
_LENGTH = struct.Struct("<q")


def read(source: SourcePath) -> Layout:
    """Read the layout of a file of this format, which holds no checksums.

    Raises:
        FormatError: It was written on a big-endian machine, or holds storages of an unknown kind.
        UnsafePickleError: It names something that is not on the list of safe names.
        CorruptCheckpointError: It is damaged.
    """
    return whole_layout(source.path, "torch_legacy", _read_tree(source.path, source.trust))


def _read_tree(path: Path, trust: bool) -> Any:
    with path.open("rb") as file:
        read_pickle(file, file=path)
        version, machine = read_pickle(file, file=path), read_pickle(file, file=path)
        if version != _PROTOCOL_VERSION or not isinstance(machine, dict):
            raise FormatError(f"{path.name} has the unknown protocol version {version!r}.", file=str(path))
        if machine.get("little_endian") is not True:
            raise FormatError(f"{path.name} was written on a big-endian machine.", file=str(path))
        begin = file.tell()
        # Where a storage lies is known only after the pickle that refers to it: read that twice.
        found: dict[str, tuple[str | None, int]] = {}
        _read_content(file, path, trust, lambda key, dtype, count: _announced(path, found, key, dtype, count))
        keys = read_pickle(file, file=path)
        records = _locate(file, path, keys, found)
        file.seek(begin)
        return _read_content(file, path, trust, lambda key, dtype, _: Storage(dtype, records[key]))


def _read_content(file: BinaryIO, path: Path, trust: bool, storage: Callable[[str, str | None, int], Storage]) -> Any:
    def persistent(pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], type | StandIn):
            return pid[1]  # a class, with its source
        if not (isinstance(pid, tuple) and len(pid) == 6 and pid[0] == "storage" and isinstance(pid[1], StorageClass)):
            raise FormatError(f"{path.name} refers to a storage of an unknown kind.", file=str(path))
        _, kind, key, _, count, view = pid
        if view is not None:
            raise FormatError(
                f"{path.name} holds views of storages, as torch before version 0.4 wrote them; load it with torch.load "
                "and save it again.",
                file=str(path),
            )
        if type(count) is not int or count < 0:
            raise ValueError(f"storage {key!r} has the length {count!r}")
        return storage(str(key), kind.dtype, count)

    functions = TensorBuilder(path).functions()
    return read_pickle(file, file=path, trust=trust, functions=functions, persistent=persistent)


def _announced(
    path: Path, found: dict[str, tuple[str | None, int]], key: str, dtype: str | None, count: int
) -> Storage:
    found.setdefault(key, (dtype, count))
    return Storage(dtype, Record(path, 0, _nbytes(dtype, count), None))


def _nbytes(dtype: str | None, count: int) -> int:
    return count * (1 if dtype is None else itemsize(dtype))


def _locate(file: BinaryIO, path: Path, keys: Any, found: Mapping[str, tuple[str | None, int]]) -> dict[str, Record]:
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(found):
        raise CorruptCheckpointError(
            f"The list of storages in {path.name} does not fit what its content refers to.", file=str(path)
        )
    size = path.stat().st_size
    records = {}
    position = file.tell()
    lengths = itertools.accumulate((_LENGTH.size + _nbytes(*found[str(key)]) for key in keys), initial=position)
    prefetch(file.fileno(), ((at, _LENGTH.size) for at in lengths))
    for key in map(str, keys):
        file.seek(position)
        header = file.read(_LENGTH.size)
        dtype, count = found[key]
        nbytes = _nbytes(dtype, count)
        if len(header) < _LENGTH.size or position + _LENGTH.size + nbytes > size:
            raise CorruptCheckpointError(
                f"{path.name} is truncated: storage {key!r} of {nbytes} bytes reaches past its end.",
                file=str(path),
                offset=position,
            )
        stored = _LENGTH.unpack(header)[0]
        if stored != count:
            raise CorruptCheckpointError(
                f"Storage {key!r} in {path.name} has {stored} elements (expected {count}).",
                file=str(path),
                offset=position,
            )
        position += _LENGTH.size
        records[key] = Record(path, position, nbytes, None)
        position += nbytes
    if position != size:
        raise CorruptCheckpointError(
            f"{path.name} has {size} bytes (expected {position}): it is too long.", file=str(path), offset=position
        )
    return records
