"""Writes the ``.metadata`` pickle of a torch DCP directory: which tensors there are, their boxes, and where each lies.

The classes that it names are those of torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmfsdp.checkpoint.formats.dcp_metadata import Box, Location
from mmfsdp.checkpoint.pickles import PickledObject
from mmfsdp.checkpoint.pickling import PickleWriter

__all__ = ["WrittenTensor", "dcp_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor as the metadata describes it."""

    dtype: str
    """Canonical dtype name."""
    shape: tuple[int, ...]
    """Global shape in elements."""
    boxes: tuple[Box, ...]
    """The boxes that it is stored in."""


def dcp_metadata(
    names: Mapping[str, tuple[str | int, ...]],
    tensors: Mapping[str, WrittenTensor],
    locations: Mapping[tuple[str, tuple[int, ...] | None], Location],
) -> bytes:
    """Return the content of ``.metadata``.

    Args:
        names: Flat name to the nested keys that it was made of.
        tensors: Flat name to tensor; every other name is of a pickled object.
        locations: Flat name and offsets of the box (``None`` for an object) to where it is stored.
    """
    content = _made(
        _METADATA,
        "Metadata",
        {
            "state_dict_metadata": {name: _described(tensors.get(name)) for name in names},
            "planner_data": dict(names),
            "storage_data": {_index(key, tensors): _stored(place) for key, place in locations.items()},
            "storage_meta": None,
            "version": "1.0.0",
        },
    )
    return PickleWriter(_no_tensor).dumps(content)


def _described(tensor: WrittenTensor | None) -> PickledObject:
    if tensor is None:
        return _made(_METADATA, "BytesStorageMetadata", {})
    chunks = [
        _made(_METADATA, "ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)})
        for offsets, sizes in tensor.boxes
    ]
    state = {"properties": _properties(tensor.dtype), "size": _size(tensor.shape), "chunks": chunks}
    return _made(_METADATA, "TensorStorageMetadata", state)


def _index(key: tuple[str, tuple[int, ...] | None], tensors: Mapping[str, WrittenTensor]) -> PickledObject:
    name, offsets = key
    if offsets is None:
        return _made(_METADATA, "MetadataIndex", {"fqn": name, "offset": None, "index": None})
    place = next(number for number, (begin, _) in enumerate(tensors[name].boxes) if begin == offsets)
    return _made(_METADATA, "MetadataIndex", {"fqn": name, "offset": _size(offsets), "index": place})


def _stored(place: Location) -> PickledObject:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
    return _made(_STORAGE, "_StorageInfo", state)


@cache
def _properties(dtype: str) -> PickledObject:
    layout = _called("torch.serialization", "_get_layout", "torch.strided")
    contiguous = _called(_METADATA, "_MEM_FORMAT_ENCODING", 0)
    # dtype, layout, requires_grad, memory format, pin_memory
    return _made(_METADATA, "TensorProperties", (_class("torch", dtype), layout, False, contiguous, False))


def _size(numbers: Sequence[int]) -> PickledObject:
    return _called("torch", "Size", tuple(numbers))


@cache
def _class(module: str, name: str) -> type[PickledObject]:
    return type(name, (PickledObject,), {"module": module, "qualname": name})


def _called(module: str, name: str, *args: Any) -> PickledObject:
    return _class(module, name)(*args)


def _made(module: str, name: str, state: Any) -> PickledObject:
    kind = _class(module, name)
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made


def _no_tensor(writer: PickleWriter, ref: Any) -> None:
    raise TypeError(f"the metadata holds no tensors: {ref!r}")
