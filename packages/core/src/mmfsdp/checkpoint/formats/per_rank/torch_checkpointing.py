"""Reads the directories of torch_checkpointing, Meta's successor to DCP: ``{item}_{rank}.pt`` and ``metadata.pkl``.

An item is what the caller gave a name: ``model``, ``optimizer``, ``step``. Its files hold DTensors, which say where
they lie. ``metadata.pkl`` is there if an item can be resharded. It says how many ranks there were, and in which files
such items are (torch_checkpointing/distributed_metadata.py, checkpoint_layout.py, version 2.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmfsdp.basics.text import missing
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import SourcePath
from mmfsdp.checkpoint.formats.per_rank.dtensor_ranks import FileOfRank, FilesOfRanks, own_content, shared_content
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledTensor
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.pickles.unpickling import read_pickle
from mmfsdp.checkpoint.tree import find_leaves, map_leaves
from mmfsdp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    MmfsdpError,
)

__all__ = ["read"]

_METADATA = "metadata.pkl"
_NAME = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,9})\.pt", re.ASCII)


@dataclass(frozen=True)
class _Metadata:
    """The content of ``metadata.pkl``."""

    ranks: int | None = None
    """How many wrote the checkpoint; ``None`` without the file."""
    files: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """For each item that can be resharded, rank to file."""


def read(source: SourcePath) -> Layout:
    """Read the layout of such a directory.

    An item whose files differ, and hold no DTensor, is each rank's own: a list by rank.

    Raises:
        CheckpointNotFoundError: There is no such file.
        IncompleteCheckpointError: Files of some ranks are missing; they are named.
        CorruptCheckpointError: A file is of another save, or damaged.
        FormatError: An item is in files of another kind, or no file holds a DTensor where there are several ranks.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    metadata = _metadata(source)
    items = {item: FilesOfRanks(files, source.trust, item) for item, files in _items(source, metadata).items()}
    tensors: dict[str, TensorEntry] = {}
    content: dict[str, Any] = {}
    for item, files in items.items():
        if not files.first.tensors and item not in metadata.files and not _alike(files.all()):
            content[item] = [own_content(f"{item}/{index}", file, tensors) for index, file in enumerate(files.all())]
        else:
            content[item] = shared_content(f"{item}/", files, tensors, look_up=source.look_up)
    ranks = max(len(files.paths) for files in items.values())
    if ranks > 1 and metadata.ranks is None and not any(files.first.tensors for files in items.values()):
        path = next(iter(items.values())).first.path
        raise FormatError(
            f"{source.path.name} holds {path.name} and the like, but no {_METADATA} and no DTensor, so that nothing "
            "says how its files belong together. If each is a checkpoint of its own, open one of them.",
            file=str(path),
        )
    return Layout(source.path, "torch_checkpointing", metadata.ranks or ranks, tensors, content)


def _metadata(source: SourcePath) -> _Metadata:
    if _METADATA not in source.names:
        return _Metadata()
    path = inside(source.path, _METADATA, source.path)
    content = read_pickle(path.read_bytes(), file=path, trust=source.trust)
    try:
        if (version := content["version"]) != "2.0":
            raise FormatError(f"{_METADATA} is of version {version!r} (expected '2.0').", file=str(path))
        ranks = content["world_size"]
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"it was written by {ranks!r} ranks")
        files = {item: _files(path, item, held, ranks) for item, held in content["metadata"].items()}
    except MmfsdpError:
        raise
    except Exception as error:  # crafted content can be of any shape
        raise damaged(_METADATA, error, path) from error
    return _Metadata(ranks, files)


def _files(path: Path, item: str, held: Any, ranks: int) -> dict[int, str]:
    """Return the file of each rank of an item."""
    layouts = held["rank_to_layout_info"]
    if len(layouts) != ranks or not all(type(rank) is int and 0 <= rank < ranks for rank in layouts):
        raise ValueError(f"item {item!r} has files of other ranks than 0 to {ranks - 1}")
    for groups in held["nested_path_to_metadata"].values():
        for group in groups:
            if (kind := group["sharding_metadata"]["type"]) != "DTensorShardingMetadata":
                raise FormatError(
                    f"Item {item!r} of {path.parent.name} holds tensors described as {kind}, which is not supported. "
                    "Save DTensors.",
                    file=str(path),
                )
    found = {}
    for rank, layout in sorted(layouts.items()):
        kind = layout["serialization_format"]["type"] if layout else "TorchSerialization"
        if kind != "TorchSerialization":
            raise FormatError(
                f"Item {item!r} of {path.parent.name} is stored with {kind}, which is not supported. Save it with the "
                "default, TorchSerialization.",
                file=str(path),
            )
        found[rank] = layout["file_path"] if layout else f"{item}_{rank}.pt"
    return found


def _items(source: SourcePath, metadata: _Metadata) -> dict[str, dict[int, Path]]:
    """Return rank to file of each item."""
    items: dict[str, dict[int, Path]] = {}
    for name in source.names:
        if match := _NAME.fullmatch(name):
            files, rank = items.setdefault(match["item"], {}), int(match["rank"])
            if rank in files:
                raise CorruptCheckpointError(
                    f"{files[rank].name} and {name} are both of rank {rank}.", file=str(source.path / name)
                )
            files[rank] = inside(source.path, name, source.path)
    for item, named in metadata.files.items():
        chosen = {rank: inside(source.path, name, source.path) for rank, name in named.items()}
        missing = [path.name for path in chosen.values() if not path.is_file()]
        if missing:
            raise _missing(source.path, item, len(named), missing)
        extra = [path.name for path in items.get(item, {}).values() if path not in chosen.values()]
        if extra:
            raise CorruptCheckpointError(
                f"{extra[0]} is left over from another save: {_METADATA} does not list it. Remove it.",
                file=str(source.path / extra[0]),
            )
        items[item] = chosen
    for item, files in items.items():
        ranks = metadata.ranks or max(files) + 1
        absent = [f"{item}_{rank}.pt" for rank in range(min(ranks, len(files) + 8)) if rank not in files]
        if absent and [*files] != [0]:  # what the first rank alone saved is whole
            raise _missing(source.path, item, ranks, absent)
    if not items:
        raise CheckpointNotFoundError(f"{source.path.name} holds no file such as model_0.pt.", file=str(source.path))
    return items


def _missing(directory: Path, item: str, ranks: int, names: list[str]) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"Item {item!r} of {directory.name} was saved by {ranks} ranks, but {missing(names, quoted=True)}.",
        file=str(directory / names[0]),
    )


def _alike(files: list[FileOfRank]) -> bool:
    """Tell whether the files of all ranks hold the same, by the checksums of their tensors."""
    first, *others = [map_leaves(file.tree, _checked) for file in files]
    unknown = any(tensor.record.crc32 is None for file in files for _, tensor in find_leaves(file.tree, PickledTensor))
    return not others or (not unknown and all(other == first for other in others))


def _checked(_: str, leaf: Any) -> Any:
    if not isinstance(leaf, PickledTensor):
        return leaf
    return leaf.dtype, leaf.shape, leaf.strides, leaf.offset - leaf.record.offset, leaf.record.nbytes, leaf.record.crc32
