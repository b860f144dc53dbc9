"""Reads the directories of torch's distributed checkpoint (DCP): ``.metadata`` and ``*.distcp`` files.

``.metadata`` is a pickle of the classes of torch/distributed/checkpoint/metadata.py and filesystem.py; none is
imported, and every value is checked. Each stored tensor is a complete ``torch.save`` archive within a ``.distcp`` file,
at the offset in the metadata; with ``SerializationFormat.SAFETENSORS`` the tensors of a file are one safetensors file
at its end instead. Values that are not tensors are ``torch.save`` archives in both.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from reprlib import repr as brief  # what is in a pickle may refer to itself many times over
from typing import Any

from mmfsdp.basics.boxes import Bounds, ListedBoxes
from mmfsdp.basics.dtypes import DTYPES
from mmfsdp.checkpoint.chunks import Unlocated
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import SourcePath
from mmfsdp.checkpoint.formats.dcp.items import DcpItems, Location, Locations
from mmfsdp.checkpoint.formats.dcp.names import IntegerKey, Keys, mark_integers
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledShards, PickledTensor, add_whole
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.pickles.unpickling import Attributes, PickledObject, fields, integers, read_pickle
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import (
    CheckpointNotFoundError,
    FormatError,
    IncompleteCheckpointError,
    MmfsdpError,
)

__all__ = [
    "INTEGER_KEYS",
    "DcpMetadata",
    "TensorInfo",
    "holds_flat_parameters",
    "insert_value",
    "read_as_stored",
    "read_dcp_metadata",
    "read_value",
]

INTEGER_KEYS = "mmfsdp_integer_keys"
"""The attribute of ``.metadata`` that says which keys of dicts are integers, as positions by flat name."""

_ELEMENTS = 1 << 62  # more is damage, or malice
_DEPTH = 100  # of nested keys


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the metadata describes it."""

    dtype: str
    """Canonical dtype name."""
    shape: tuple[int, ...]
    """Global shape in elements."""
    boxes: tuple[Bounds, ...]
    """The chunks that it was saved in."""


_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_FLAT = "_flat_param"  # the end of the name of FSDP1's flat parameters


def read_as_stored(source: SourcePath) -> Layout:
    """Read the layout of a DCP directory. Tensors in its files are located only when their chunks are asked for.

    The tensors are those that are stored, also where they are FSDP1's flat parameters.

    Raises:
        IncompleteCheckpointError: A file is missing. ``check_coverage`` finds tensors that lack chunks.
        CorruptCheckpointError: The metadata is damaged, or contradicts the files.
        FormatError: The checkpoint was saved compressed, or names files outside of the directory.
        UnsafePickleError: A pickle names something that is not on the list of safe names.
    """
    directory, trust = source.path, source.trust
    if not (directory / ".metadata").exists():
        raise CheckpointNotFoundError(
            f"{directory.name} has no .metadata, which torch's DCP writes last.", file=str(directory)
        )
    metadata = read_dcp_metadata(inside(directory, ".metadata", directory), trust=trust)
    items = DcpItems(directory, metadata.locations, trust)
    tensors: dict[str, TensorEntry] = {}
    tree: dict[Any, Any] = {}
    for name in metadata.names:
        keys = metadata.paths[name]
        path = "/".join(map(str, keys))
        if name in metadata.tensors:
            unique = unique_name(path, tensors)
            tensors[unique] = _tensor(name, unique, metadata, items)
            insert_value(tree, keys, TensorRef(unique), len(metadata.names), directory)
        else:
            value = read_value(directory, name, path, metadata.locations.get((name, None)), items, tensors)
            insert_value(tree, keys, value, len(metadata.names), directory)
    files = sorted({location.file for location in metadata.locations.values()})
    ranks = [int(match[1]) for file in files if (match := _RANK.fullmatch(file))]
    world_size = max(ranks) + 1 if len(ranks) == len(files) and ranks else max(len(files), 1)
    return Layout(directory, "dcp", world_size, tensors, tree)


def holds_flat_parameters(layout: Layout) -> bool:
    """Tell whether a layout has FSDP1's flat parameters among its tensors, as its ``LOCAL_STATE_DICT`` leaves them."""
    return any(name.endswith(_FLAT) for name in layout.tensors)


def _tensor(name: str, unique: str, metadata: DcpMetadata, items: DcpItems) -> TensorEntry:
    info = metadata.tensors[name]
    boxes: dict[Bounds, Location] = {}
    for box in info.boxes:
        location = metadata.locations.get((name, box[0]))
        if location is not None and 0 not in box[1]:
            boxes[box] = location
    stored = Unlocated(ListedBoxes(boxes), functools.partial(items.chunks, name, info.dtype))
    return TensorEntry(unique, info.dtype, info.shape, stored)


def read_value(
    directory: Path, name: str, path: str, location: Location | None, items: DcpItems, tensors: dict[str, TensorEntry]
) -> Any:
    """Return a value that is not a tensor, with its inner tensors added to ``tensors``.

    Args:
        directory: The checkpoint.
        name: The flat name of the value.
        path: The keys that lead to it, joined with ``/``.
        location: Where it is stored, if that is known.
        items: What reads it.
        tensors: The tensors of the layout by name.

    Raises:
        IncompleteCheckpointError: Nothing says where it is stored.
        CheckpointError: It cannot be read.
    """
    if location is None:
        raise IncompleteCheckpointError(
            f"The metadata does not say where {name!r} is stored.", file=str(directory / ".metadata")
        )

    def bind(inner: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledShards):
            raise FormatError(f"{name!r} in {location.file} holds one rank's part of a tensor.", file=location.file)
        if not isinstance(leaf, PickledTensor):
            return leaf
        return add_whole(f"{path}/{inner}" if inner else path, leaf, tensors)

    return map_leaves(items.load(name, location), bind)


def insert_value(tree: dict[Any, Any], keys: Keys, value: Any, limit: int, directory: Path) -> None:
    """Set a value under nested keys as torch's planner does: an integer indexes a list.

    Args:
        tree: The nested content so far.
        keys: The keys.
        value: The value.
        limit: More than any index of a list.
        directory: The checkpoint.

    Raises:
        CorruptCheckpointError: The keys contradict the keys of other values.
    """
    container: Any = tree
    for step, following in itertools.zip_longest(keys, keys[1:]):
        key: Any = int(step) if isinstance(step, IntegerKey) else step
        if isinstance(step, str):
            fits = isinstance(container, dict)
        else:
            fits = isinstance(container, list) and step < limit
        if fits and isinstance(container, list):
            container.extend([None] * (key + 1 - len(container)))
        held = None if not fits or (isinstance(container, dict) and key not in container) else container[key]
        if not fits or (following is None and held is not None):
            raise damaged(".metadata", f"the keys {keys!r} do not fit the others", directory / ".metadata")
        if held is None:
            held = value if following is None else [] if isinstance(following, int) else {}
            container[key] = held
        container = held


@dataclass(frozen=True)
class DcpMetadata:
    """The content of a ``.metadata`` file."""

    tensors: Mapping[str, TensorInfo]
    """Flat name to tensor."""
    names: tuple[str, ...]
    """All flat names, in the order of the state dict if it is known."""
    locations: Locations
    """Flat name and offsets of the chunk (``None`` for an object) to where it is stored."""
    paths: Mapping[str, Keys]
    """Flat name to the nested keys that it was made of."""
    flattened: frozenset[str] = frozenset()
    """Names of the tensors that older releases of Megatron stored flattened, in another shape than their own."""


class _ChunkMetadata(Attributes):
    offsets: Any
    sizes: Any


class _Index(Attributes):
    fqn: Any
    offset: Any = None


class _StorageInfo(Attributes):
    relative_path: Any
    offset: Any
    length: Any
    transform_descriptors: Any = None


# Classes with several objects per chunk.
_MADE: Mapping[str, Callable[..., Any]] = {
    "torch.Size": itemgetter(slice(1000)),  # its sizes; they are checked when the tensor is known
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata": _ChunkMetadata,
    "torch.distributed.checkpoint.metadata.MetadataIndex": _Index,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
}


def read_dcp_metadata(path: Path, *, trust: bool = False) -> DcpMetadata:
    """Read a ``.metadata`` file.

    Args:
        path: The file.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.

    Raises:
        FormatError: It describes something that cannot be read here.
        UnsafePickleError: It names something that is not on the list of safe names.
        CorruptCheckpointError: It is damaged, or its values make no sense.
    """
    content = read_pickle(path.read_bytes(), file=path, trust=trust, functions=_MADE)
    try:
        if not isinstance(content, PickledObject) or content.qualname != "Metadata":
            raise FormatError(f"{path.name} is not the metadata of a torch DCP checkpoint.", file=str(path))
        return _parsed(path, fields(content))
    except MmfsdpError:
        raise
    except Exception as error:  # crafted content can be of any shape
        raise damaged(path.name, error, path) from error


def _parsed(path: Path, content: Mapping[str, Any]) -> DcpMetadata:
    tensors: dict[str, TensorInfo] = {}
    described = content["state_dict_metadata"]
    for name, value in described.items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not a name")
        if value.qualname == "TensorStorageMetadata":
            tensors[name] = _tensor_info(path, name, fields(value))
        elif value.qualname != "BytesStorageMetadata":
            raise ValueError(f"{name!r} is a {value.qualname}")
    locations: dict[tuple[str, tuple[int, ...] | None], Location] = {}
    for index, value in (content.get("storage_data") or {}).items():
        name, offset = index.fqn, index.offset
        if type(name) is not str or name not in described:
            raise ValueError(f"it locates {brief(name)}, but does not describe it")
        key = name, None if offset is None else integers(offset)
        if key in locations:
            raise ValueError(f"{name!r} at {key[1]} is stored twice")
        locations[key] = _location(path, name, value)
    planned = content.get("planner_data") or {}
    # In the order of the state dict, if it is known: the other is that in which ranks write.
    marks = content.get(INTEGER_KEYS) or {}
    paths = {
        name: mark_integers(_path(name, planned.get(name)), marks.get(name, ()))
        for name in dict.fromkeys([*planned, *described])
        if name in described
    }
    of_megatron = content.get("mcore_data") or {}
    flattened = {
        name for name, held in of_megatron.items() if held.get("nd_reformulated_orig_global_shape") is not None
    }
    return DcpMetadata(tensors, tuple(paths), locations, paths, frozenset(flattened))


def _tensor_info(path: Path, name: str, content: Mapping[str, Any]) -> TensorInfo:
    properties = content["properties"]
    state = fields(properties)
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not (isinstance(dtype, type) and issubclass(dtype, PickledObject)) or dtype.qualname not in DTYPES:
        raise FormatError(f"Tensor {name!r} of {path.name} has a dtype that is unknown here.", file=str(path))
    shape = _sizes(name, content["size"])
    boxes = []
    for chunk in content["chunks"]:
        offsets, sizes = _sizes(name, chunk.offsets), _sizes(name, chunk.sizes)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of tensor {name!r} has {len(sizes)} dimensions (expected {len(shape)})")
        _check_size(name, sizes)
        boxes.append((offsets, sizes))
    _check_size(name, shape)
    return TensorInfo(dtype.qualname, shape, tuple(boxes))


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    try:
        return integers(value)
    except ValueError as error:
        raise ValueError(f"the size of tensor {name!r} is invalid: {error}") from error


def _check_size(name: str, sizes: tuple[int, ...]) -> None:
    if math.prod(filter(None, sizes) if 0 in sizes else sizes) > _ELEMENTS:
        raise ValueError(f"tensor {name!r} has the size {list(sizes)}")


def _location(path: Path, name: str, stored: _StorageInfo) -> Location:
    file, offset, length = stored.relative_path, stored.offset, stored.length
    if not isinstance(file, str):
        raise ValueError(f"the file of {name!r} is {brief(file)}")
    if not (type(offset) is type(length) is int and 0 <= offset < _ELEMENTS and 0 <= length < _ELEMENTS):
        raise ValueError(f"{name!r} lies at byte {brief(offset)} with length {brief(length)} in {file}")
    if stored.transform_descriptors:
        through = ", ".join(item if isinstance(item, str) else brief(item) for item in stored.transform_descriptors)
        raise FormatError(
            f"{name!r} of {path.name} is stored through {through} (compressed or encrypted), "
            "which cannot be read here. Load it with torch and save it plainly.",
            file=str(path),
        )
    return Location(file, offset, length)


def _path(name: str, value: Any) -> Keys:
    if value is None:
        return (name,)  # saved without a planner's mapping: names as they are
    if not isinstance(value, tuple | list) or not 1 <= len(value) <= _DEPTH or not isinstance(value[0], str):
        raise ValueError(f"the keys of {name!r} are {brief(value)}")
    for key in value:
        if type(key) is not str and (type(key) is not int or key < 0):
            raise ValueError(f"the keys of {name!r} are {brief(value)}")
    return tuple(value)
