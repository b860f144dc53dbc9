"""Reads the zip files of ``torch.save`` (``.pth``, ``.pt``) into a layout, without torch and without reading data.

An archive holds ``<root>/data.pkl`` (a pickle whose persistent ids name storages), ``<root>/byteorder`` and one record
``<root>/data/<key>`` per storage: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mmfsdp.basics.descriptors import read_at
from mmfsdp.basics.dtypes import DTYPES, itemsize
from mmfsdp.checkpoint.chunks import Chunk, Record, simplified_strides
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.other_frameworks import what_to_use
from mmfsdp.checkpoint.formats.common.source import SourcePath, is_of_fairscale, one_of_many
from mmfsdp.checkpoint.formats.torch_files.zip_archive import ZipRecord, read_records
from mmfsdp.checkpoint.integrity import crc32
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.pickles.unpickling import PickledObject, StandIn, fields, integers, read_pickle, shown
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = [
    "STORAGE_CLASSES",
    "PickledDTensor",
    "PickledShards",
    "PickledTensor",
    "Storage",
    "StorageClass",
    "TensorBuilder",
    "add_whole",
    "read",
    "read_archive",
    "read_tree",
    "whole_layout",
]


def read(source: SourcePath) -> Layout:
    """Read the layout of a ``.pth`` or ``.pt`` file.

    Raises:
        FormatError: It is a zip archive but not a checkpoint, or a single rank's part of a ``local`` checkpoint.
        UnsafePickleError: It names something that is not on the list of safe names.
        CorruptCheckpointError: It is damaged.
    """
    return whole_layout(source.path, "torch_zip", read_tree(source.path, trust=source.trust))


def whole_layout(path: Path, kind: str, content: Any) -> Layout:
    """Return the layout of a file whose tensors are whole.

    Raises:
        FormatError: It is a single rank's part of a checkpoint.
    """
    if isinstance(content, dict) and ("mmfsdp" in content or any(map(is_of_fairscale, content.values()))):
        raise one_of_many(path)
    tensors: dict[str, TensorEntry] = {}

    def bind(name: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledShards) or (isinstance(leaf, PickledDTensor) and not leaf.is_whole):
            raise one_of_many(path)
        if isinstance(leaf, PickledDTensor):
            leaf = leaf.local
        return add_whole(name, leaf, tensors) if isinstance(leaf, PickledTensor) else leaf

    tree = map_leaves(content, bind)
    return Layout(path, kind, 1, tensors, tree)


def add_whole(name: str, leaf: PickledTensor, tensors: dict[str, TensorEntry]) -> TensorRef:
    """Add a whole tensor to a layout's tensors under its name, or one like it if that is taken; return its mark."""
    unique = unique_name(name, tensors)
    tensors[unique] = TensorEntry(unique, leaf.dtype, leaf.shape, (leaf.chunk((0,) * len(leaf.shape)),))
    return TensorRef(unique, leaf.parameter)


def read_tree(path: Path, *, trust: bool = False) -> Any:
    """Return the nested content of a ``.pth`` file with each tensor replaced by a ``PickledTensor``.

    Raises:
        FormatError, UnsafePickleError, CorruptCheckpointError: See `read`.
    """
    with path.open("rb", buffering=0) as file:
        return read_archive(path, file.fileno(), read_records(path, source=file.fileno()), trust=trust)


def read_archive(path: Path, source: int, records: Mapping[str, ZipRecord], *, trust: bool = False) -> Any:
    """Return the nested content of an archive, which may be only part of a file; see ``read_tree``."""
    pickled = [name for name in records if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(pickled) != 1:
        text = what_to_use(b"", [*records]) or "is a zip archive but not a file of torch.save: it has no data.pkl."
        raise FormatError(f"{path.name} {text}", file=str(path))
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
    data = read_at(source, record.nbytes, record.offset)
    if len(data) != record.nbytes or record.crc32 not in (None, crc32(data)):
        raise damaged(f"Entry {record.name!r} of {path.name}", "its CRC-32 does not match", path, record.offset)
    return data


def _storage(path: Path, root: str, records: Mapping[str, ZipRecord], pid: Any) -> Storage:
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], StorageClass)):
        raise FormatError(f"{path.name} refers to a storage of an unknown kind.", file=str(path))
    _, kind, key, _, _ = pid
    record = records.get(f"{root}data/{key}")
    if record is None:
        raise CorruptCheckpointError(
            f"{path.name} lacks the data of storage {key!r}: there is no entry 'data/{key}'.", file=str(path)
        )
    return Storage(kind.dtype, Record(path, record.offset, record.nbytes, record.crc32))


_LIMIT = 1 << 62  # bytes of a tensor: more is damage, or malice

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
class PickledTensor:
    """A tensor in an archive: a view of a storage record."""

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
        nbytes = math.prod(self.shape) * itemsize(self.dtype)
        return Chunk(self.record.file, self.offset, nbytes, box_offsets, self.shape, self.strides, self.record)


@dataclass(frozen=True, slots=True)
class PickledShards:
    """A ``ShardedTensor`` of ``torch.distributed`` as one rank's archive holds it."""

    dtype: str
    """Canonical dtype name."""
    shape: tuple[int, ...]
    """Global shape in elements."""
    parts: tuple[tuple[PickledTensor, tuple[int, ...]], ...]
    """The shards of this rank, each with the offsets of its box."""
    rank: int
    """Which rank wrote it."""
    world_size: int
    """Number of ranks that the tensor is spread over."""


@dataclass(frozen=True, slots=True)
class PickledDTensor:
    """A ``DTensor`` of ``torch.distributed`` as one rank's archive holds it."""

    local: PickledTensor
    """The box that this rank holds."""
    shape: tuple[int, ...]
    """Global shape in elements."""
    is_whole: bool
    """Whether this rank holds all of it."""
    spec: Mapping[str, Any]
    """Its ``DTensorSpec``, which says where the box is."""


class Storage(NamedTuple):
    """The storage that a persistent id of a pickle refers to."""

    dtype: str | None
    """Canonical dtype name; ``None`` if it is counted in bytes."""
    record: Record
    """The record with its data."""


class StorageClass(StandIn):
    """Stands for a storage class in a persistent id."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str | None) -> None:
        super().__init__()
        self.dtype = dtype


_UNREAD = {
    "_rebuild_sparse_tensor": "a sparse tensor; save its to_dense()",
    "_rebuild_nested_tensor": "a nested tensor; save its unbind(), or its to_padded_tensor()",
    "_rebuild_qtensor": "a quantized tensor; save its dequantize(), or its int_repr() and scales",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no data; leave it out",
}
"""Functions of torch._utils that rebuild tensors of kinds that no format here holds, with the kind and the remedy."""
_QUANTIZED = ("QInt8Storage", "QUInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage")
_QUANTIZERS = ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")


class TensorBuilder:
    """Stand-ins for torch's functions that rebuild tensors (torch/_utils.py)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def functions(self) -> dict[str, StandIn]:
        names: dict[str, StandIn] = {
            "torch._utils._rebuild_tensor": StandIn(self._tensor_v1),
            "torch._utils._rebuild_tensor_v2": StandIn(self._tensor_v2),
            "torch._utils._rebuild_tensor_v3": StandIn(self._tensor_v3),
            "torch._utils._rebuild_parameter": StandIn(self._parameter),
            "torch._utils._rebuild_parameter_with_state": StandIn(self._parameter),
            "torch._tensor._rebuild_from_type_v2": StandIn(self._from_type),
            "torch._utils._rebuild_wrapper_subclass": StandIn(_nothing),
            "torch.storage.UntypedStorage": StorageClass(None),
            "torch.UntypedStorage": StorageClass(None),
        }
        names |= {f"torch.{name}": StorageClass("uint8") for name in _QUANTIZED}
        names |= {f"torch.{name}": StandIn() for name in _QUANTIZERS}
        names |= {f"torch._utils.{name}": StandIn(self._refusal(said)) for name, said in _UNREAD.items()}
        for dtype, name in STORAGE_CLASSES.items():
            names[f"torch.{name}"] = names[f"torch.cuda.{name}"] = names[f"torch.storage.{name}"] = StorageClass(dtype)
        return names

    def _refusal(self, said: str) -> Callable[..., Any]:
        def refuse(*_: Any) -> Any:
            raise FormatError(f"{self._path.name} holds {said} instead.", file=str(self._path))

        return refuse

    def _tensor_v1(self, storage: Any, offset: Any, size: Any, stride: Any) -> PickledTensor:
        return self._view(storage, storage.dtype, offset, size, stride)

    def _tensor_v2(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None
    ) -> PickledTensor:
        return self._view(storage, storage.dtype, offset, size, stride, metadata)

    def _tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, meta: Any = None
    ) -> PickledTensor:
        named = isinstance(dtype, type) and issubclass(dtype, PickledObject) and dtype.module == "torch"
        return self._view(storage, dtype.qualname if named else None, offset, size, stride, meta)

    def _parameter(self, data: Any, requires_grad: Any, *_: Any) -> PickledTensor | PickledDTensor:
        if isinstance(data, PickledDTensor):
            return replace(data, local=replace(data.local, parameter=bool(requires_grad)))
        return PickledTensor(data.dtype, data.shape, data.offset, data.strides, data.record, bool(requires_grad))

    def _from_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        name = kind.qualname if isinstance(kind, type) and issubclass(kind, PickledObject) else ""
        if name == "ShardedTensor":
            return _shards(state)
        if name == "DTensor":
            return _dtensor(state)
        # A tensor with Python attributes, or of a subclass: the data counts, the attributes do not.
        tensor = function(*args) if isinstance(function, StandIn) else None
        if not isinstance(tensor, PickledTensor):
            named = f"{kind.module}.{name}" if name else "of an unknown kind"
            raise FormatError(
                f"{self._path.name} holds a tensor that is not a plain one: {shown(named)}. Save plain tensors, "
                "such as what dequantize() of quantised ones returns.",
                file=str(self._path),
            )
        return tensor

    def _view(
        self, storage: Storage, dtype: str | None, offset: Any, size: Any, stride: Any, metadata: Any = None
    ) -> PickledTensor:
        if dtype not in DTYPES:
            raise FormatError(f"{self._path.name} holds a tensor of unknown dtype {dtype!r}.", file=str(self._path))
        if metadata and any(dict(metadata).values()):
            raise FormatError(
                f"{self._path.name} holds a tensor that is conjugated or negated lazily; save its resolve_conj() and "
                "resolve_neg() instead.",
                file=str(self._path),
            )
        item = itemsize(dtype)
        shape, strides = integers(size), integers(stride)
        record, numel = storage.record, math.prod(shape)
        if numel * item > _LIMIT:
            raise CorruptCheckpointError(
                f"{self._path.name} holds a tensor of shape {list(shape)}, which is too large for any machine.",
                file=str(self._path),
                offset=record.offset,
            )
        first = record.offset + integers((offset,))[0] * item
        steps = simplified_strides(shape, strides)
        stored = PickledTensor(dtype, shape, first, steps, record)
        span = numel * item if steps is None else stored.chunk((0,) * len(shape)).span
        if numel and first + span > record.offset + record.nbytes:
            raise CorruptCheckpointError(
                f"{self._path.name} holds a tensor of shape {list(shape)} that reaches past its storage of "
                f"{record.nbytes} bytes.",
                file=str(self._path),
                offset=record.offset,
            )
        return stored


def _shards(state: Any) -> PickledShards:
    """Read the state of a pickled ``ShardedTensor`` (torch/distributed/_shard/sharded_tensor/api.py, __getstate__)."""
    shards, metadata, group, _spec, _rrefs = state
    ranks = fields(group)
    if ranks["local_world_size"] != ranks["global_world_size"]:
        raise ValueError("a tensor is sharded over only some of the ranks")
    described = fields(metadata)
    properties = fields(described["tensor_properties"])
    dtype = properties["dtype"] if "dtype" in properties else properties[0]
    parts = []
    for shard in shards:
        held = fields(shard)
        tensor, box = held["tensor"], fields(held["metadata"])
        if not isinstance(tensor, PickledTensor) or tensor.shape != integers(box["shard_sizes"]):
            raise ValueError("a shard does not have the size that its description says")
        parts.append((tensor, integers(box["shard_offsets"])))
    rank, world_size = integers((ranks["local_rank"], ranks["local_world_size"]))
    return PickledShards(dtype.qualname, integers(described["size"]), tuple(parts), rank, world_size)


def _dtensor(state: Any) -> PickledDTensor:
    """Read the state of a pickled ``DTensor`` (torch/distributed/tensor/_api.py)."""
    held = state[1] if isinstance(state, tuple) else state  # of a class with __slots__
    local, spec = held["_local_tensor"], fields(held["_spec"])
    if not isinstance(local, PickledTensor):
        raise ValueError("a DTensor does not hold a tensor")
    shape = integers(spec["tensor_meta"].args[0])
    divided = all(placement.qualname in ("Replicate", "Shard", "_StridedShard") for placement in spec["placements"])
    return PickledDTensor(local, shape, divided and local.shape == shape, spec)


def _nothing(*_: Any) -> None:
    """Stand for an empty tensor of a subclass, which its state fills."""
