"""Reads the directories of torch's distributed checkpoint (DCP): ``.metadata`` and ``*.distcp`` files.

Each stored tensor is a complete file of ``torch.save`` within a ``.distcp`` file, at the place that the metadata names;
with ``SerializationFormat.SAFETENSORS`` the tensors of a file are one safetensors file at its end instead. What is not
a tensor is a file of ``torch.save`` in both: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.formats.dcp_items import DcpItems
from mmfsdp.checkpoint.formats.dcp_metadata import Box, DcpMetadata, Location, read_dcp_metadata
from mmfsdp.checkpoint.formats.shard_index import inside
from mmfsdp.checkpoint.formats.sharded_tensors import StoredShards
from mmfsdp.checkpoint.formats.stored_tensors import StoredTensor
from mmfsdp.checkpoint.layout import Layout, ListedBoxes, TensorEntry, TensorRef, Unlocated
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["is_dcp", "read_dcp"]

_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def is_dcp(directory: Path) -> bool:
    """Tell whether a directory holds the metadata of a DCP checkpoint."""
    return (directory / ".metadata").is_file()


def read_dcp(directory: Path, *, trust: bool = False) -> Layout:
    """Read the layout of a DCP directory. Tensors in its files are looked up only once their chunks are asked for.

    Args:
        directory: The directory.
        trust: Keep unknown pickled objects as opaque placeholders instead of refusing them.

    Raises:
        IncompleteCheckpointError: A file is missing. A tensor that lacks chunks is found by ``check_coverage``.
        CorruptCheckpointError: The metadata is damaged, or what it says is not what the files hold.
        FormatError: It was saved compressed, or names files outside of the directory.
        UnsafePickleError: A pickle names something that is not on the list of safe names.
    """
    metadata = read_dcp_metadata(inside(directory, ".metadata", directory), trust=trust)
    items = DcpItems(directory, metadata, trust)
    tensors: dict[str, TensorEntry] = {}
    tree: dict[Any, Any] = {}
    for name in metadata.names:
        keys = metadata.paths[name]
        path = "/".join(map(str, keys))
        if name in metadata.tensors:
            unique = unique_name(path, tensors)
            tensors[unique] = _tensor(name, unique, metadata, items)
            _insert(tree, keys, TensorRef(unique), len(metadata.names), directory)
        else:
            value = _object(directory, name, path, metadata.locations.get((name, None)), items, tensors)
            _insert(tree, keys, value, len(metadata.names), directory)
    files = sorted({location.file for location in metadata.locations.values()})
    ranks = [int(match[1]) for file in files if (match := _RANK.fullmatch(file))]
    world_size = max(ranks) + 1 if len(ranks) == len(files) and ranks else max(len(files), 1)
    return Layout(directory, "dcp", world_size, tensors, tree)


def _tensor(name: str, unique: str, metadata: DcpMetadata, items: DcpItems) -> TensorEntry:
    info = metadata.tensors[name]
    boxes: dict[Box, Location] = {}
    for box in info.boxes:
        location = metadata.locations.get((name, box[0]))
        if location is not None and 0 not in box[1]:
            boxes[box] = location
    stored = Unlocated(ListedBoxes(boxes), functools.partial(items.chunks, name, info.dtype))
    return TensorEntry(unique, info.dtype, info.shape, stored)


def _object(
    directory: Path, name: str, path: str, location: Location | None, items: DcpItems, tensors: dict[str, TensorEntry]
) -> Any:
    """Return something that is not a tensor; tensors within it are taken up."""
    if location is None:
        raise IncompleteCheckpointError(
            f"The metadata does not say where {name!r} is stored.", file=str(directory / ".metadata")
        )

    def bind(inner: str, leaf: Any) -> Any:
        if isinstance(leaf, StoredShards):
            raise FormatError(f"{name!r} in {location.file} holds one rank's part of a tensor.", file=location.file)
        if not isinstance(leaf, StoredTensor):
            return leaf
        unique = unique_name(f"{path}/{inner}" if inner else path, tensors)
        tensors[unique] = TensorEntry(unique, leaf.dtype, leaf.shape, (leaf.chunk((0,) * len(leaf.shape)),))
        return TensorRef(unique, leaf.parameter)

    return map_leaves(items.load(name, location), bind)


def _insert(tree: dict[Any, Any], keys: tuple[str | int, ...], value: Any, limit: int, directory: Path) -> None:
    """Set a value under nested keys as torch's planner does: an integer is a place in a list."""
    container: Any = tree
    for key, following in itertools.zip_longest(keys, keys[1:]):
        fits = isinstance(container, list if isinstance(key, int) else dict) and (isinstance(key, str) or key < limit)
        if fits and isinstance(container, list):
            container.extend([None] * (int(key) + 1 - len(container)))
        held = None if not fits or (isinstance(container, dict) and key not in container) else container[key]
        if not fits or (following is None and held is not None):
            raise CorruptCheckpointError(
                f".metadata is damaged: the keys {keys!r} do not fit the others.", file=str(directory / ".metadata")
            )
        if held is None:
            held = value if following is None else [] if isinstance(following, int) else {}
            container[key] = held
        container = held
