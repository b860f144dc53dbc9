"""Reads the zip files of ``torch.save`` (``.pth``, ``.pt``) into a layout, without torch and without reading data.

An archive holds ``<root>/data.pkl`` (a pickle whose persistent ids name storages), ``<root>/byteorder`` and one record
``<root>/data/<key>`` per storage: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.formats.zip_archive import ZipRecord, read_records
from mmfsdp.checkpoint.layout import Chunk, Layout, Record, TensorEntry, TensorRef, row_major_strides
from mmfsdp.checkpoint.pickles import PickledObject, StandIn, read_pickle
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.dtypes import DTYPES, itemsize
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = ["STORAGE_CLASSES", "StoredTensor", "read_torch_zip", "read_tree"]

STORAGE_CLASSES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""dtype name to the typed storage class of that name; newer dtypes have none and use ``UntypedStorage``."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as one archive holds it: a view of a storage record."""

    dtype: str
    """Canonical dtype name."""
    shape: tuple[int, ...]
    """Size in elements, one per dimension."""
    offset: int
    """Offset of the first element in the file, in bytes."""
    strides: tuple[int, ...] | None
    """Steps in elements; ``None`` if packed in row-major order."""
    record: Record
    """The storage it views."""
    parameter: bool | None = None
    """``requires_grad`` if it is an ``nn.Parameter``."""

    def chunk(self, box_offsets: tuple[int, ...]) -> Chunk:
        """Return it as the chunk of a tensor whose box begins at ``box_offsets``."""
        numel = 1
        for size in self.shape:
            numel *= size
        nbytes = numel * itemsize(self.dtype)
        return Chunk(self.record.file, self.offset, nbytes, box_offsets, self.shape, self.strides, self.record)


def read_torch_zip(path: Path, *, trust: bool = False) -> Layout:
    """Read the layout of a ``.pth`` or ``.pt`` file.

    Args:
        path: The file.
        trust: Keep unknown pickled objects as opaque placeholders instead of refusing them.

    Raises:
        FormatError: It is a zip archive but not a checkpoint, or a single rank's part of a ``local`` checkpoint.
        UnsafePickleError: It names something that is not on the list of safe names.
        CorruptCheckpointError: It is damaged.
    """
    content = read_tree(path, trust=trust)
    if isinstance(content, dict) and "mmfsdp" in content:
        raise FormatError(
            f"{path.name} is one rank's part of a sharded checkpoint; open its directory {str(path.parent)!r} instead.",
            file=str(path),
        )
    tensors: dict[str, TensorEntry] = {}

    def bind(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor):
            return leaf
        unique, count = name, 1
        while unique in tensors:  # the keys 0 and '0' of one dict have the same name
            count += 1
            unique = f"{name}~{count}"
        chunk = leaf.chunk((0,) * len(leaf.shape))
        tensors[unique] = TensorEntry(unique, leaf.dtype, leaf.shape, (chunk,))
        return TensorRef(unique, leaf.parameter)

    tree = map_leaves(content, bind)
    return Layout(path, "torch_zip", 1, tensors, tree)


def read_tree(path: Path, *, trust: bool = False) -> Any:
    """Return the nested content of a ``.pth`` file with each tensor replaced by a ``StoredTensor``.

    Args and errors are those of ``read_torch_zip``.
    """
    records = read_records(path)
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
    if byteorder is not None and _read(path, byteorder) != b"little":
        raise FormatError(f"{path.name} was written on a big-endian machine.", file=str(path))
    builder = _TensorBuilder(path, root, records)
    return read_pickle(
        _read(path, records[pickled[0]]),
        file=path,
        trust=trust,
        functions=builder.functions(),
        persistent=builder.storage,
    )


def _read(path: Path, record: ZipRecord) -> bytes:
    with path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), record.nbytes, record.offset)
    if len(data) != record.nbytes or record.crc32 not in (None, zlib.crc32(data)):
        raise CorruptCheckpointError(
            f"Entry {record.name!r} of {path.name} is damaged: its CRC-32 does not match.",
            file=str(path),
            offset=record.offset,
        )
    return data


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None  # None: untyped, counted in bytes
    record: Record


class _StorageClass(StandIn):
    """Stands for a storage class in a persistent id."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str | None) -> None:
        super().__init__()
        self.dtype = dtype


class _TensorBuilder:
    """The stand-ins for torch's functions that rebuild tensors (torch/_utils.py)."""

    def __init__(self, path: Path, root: str, records: dict[str, ZipRecord]) -> None:
        self._path = path
        self._root = root
        self._records = records

    def functions(self) -> dict[str, StandIn]:
        names: dict[str, StandIn] = {
            "torch._utils._rebuild_tensor": StandIn(self._tensor_v1),
            "torch._utils._rebuild_tensor_v2": StandIn(self._tensor_v2),
            "torch._utils._rebuild_tensor_v3": StandIn(self._tensor_v3),
            "torch._utils._rebuild_parameter": StandIn(self._parameter),
            "torch._utils._rebuild_parameter_with_state": StandIn(self._parameter),
            "torch._tensor._rebuild_from_type_v2": StandIn(self._from_type),
            "torch.storage.UntypedStorage": _StorageClass(None),
        }
        for dtype, name in STORAGE_CLASSES.items():
            names[f"torch.{name}"] = names[f"torch.cuda.{name}"] = names[f"torch.storage.{name}"] = _StorageClass(dtype)
        return names

    def storage(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _StorageClass)):
            raise FormatError(f"{self._path.name} refers to a storage of an unknown kind.", file=str(self._path))
        _, kind, key, _, _ = pid
        record = self._records.get(f"{self._root}data/{key}")
        if record is None:
            raise CorruptCheckpointError(
                f"{self._path.name} lacks the data of storage {key!r}: there is no entry 'data/{key}'.",
                file=str(self._path),
            )
        return _Storage(kind.dtype, Record(self._path, record.offset, record.nbytes, record.crc32))

    def _tensor_v1(self, storage: Any, offset: Any, size: Any, stride: Any) -> StoredTensor:
        return self._view(storage, storage.dtype, offset, size, stride)

    def _tensor_v2(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None
    ) -> StoredTensor:
        return self._view(storage, storage.dtype, offset, size, stride, metadata)

    def _tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, meta: Any = None
    ) -> StoredTensor:
        named = isinstance(dtype, type) and issubclass(dtype, PickledObject) and dtype.module == "torch"
        return self._view(storage, dtype.qualname if named else None, offset, size, stride, meta)

    def _parameter(self, data: Any, requires_grad: Any, *_: Any) -> StoredTensor:
        return StoredTensor(data.dtype, data.shape, data.offset, data.strides, data.record, bool(requires_grad))

    def _from_type(self, function: Any, _kind: Any, args: Any, _state: Any) -> Any:
        # A tensor with Python attributes, or of a subclass: the data counts, the attributes do not.
        tensor = function(*args) if isinstance(function, StandIn) else None
        if not isinstance(tensor, StoredTensor):
            raise FormatError(f"{self._path.name} holds a tensor of an unknown kind.", file=str(self._path))
        return tensor

    def _view(
        self, storage: _Storage, dtype: str | None, offset: Any, size: Any, stride: Any, metadata: Any = None
    ) -> StoredTensor:
        if dtype not in DTYPES:
            raise FormatError(f"{self._path.name} holds a tensor of unknown dtype {dtype!r}.", file=str(self._path))
        if metadata and any(dict(metadata).values()):
            raise FormatError(
                f"{self._path.name} holds a tensor that is conjugated or negated lazily; save its resolve_conj() and "
                "resolve_neg() instead.",
                file=str(self._path),
            )
        item = itemsize(dtype)
        shape, strides = _integers(size), _integers(stride)
        first = storage.record.offset + _integers((offset,))[0] * item
        stored = StoredTensor(dtype, shape, first, _simplified(shape, strides), storage.record)
        chunk = stored.chunk((0,) * len(shape))
        if chunk.numel and chunk.offset + chunk.span > storage.record.offset + storage.record.nbytes:
            raise CorruptCheckpointError(
                f"{self._path.name} holds a tensor of shape {list(shape)} that reaches past its storage of "
                f"{storage.record.nbytes} bytes.",
                file=str(self._path),
                offset=storage.record.offset,
            )
        return stored


def _integers(values: Any) -> tuple[int, ...]:
    if isinstance(values, PickledObject) and values.qualname == "Size":
        values = values.args[0]
    if not isinstance(values, tuple | list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} is not a tuple of sizes")
    return tuple(values)


def _simplified(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    # The step along a dimension of one element means nothing; torch leaves any number there.
    if 0 in shape:
        return None
    packed = row_major_strides(shape)
    matters = zip(shape, strides, packed, strict=True)
    return None if all(size == 1 or step == right for size, step, right in matters) else strides
