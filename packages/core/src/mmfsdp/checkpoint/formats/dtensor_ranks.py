"""Reads a directory with a file of ``torch.save`` per rank that holds DTensors: what FSDP2 gives as a state dict.

The files are named as their writer likes, with the rank at the end. Those known here:

- verl and SkyRL: ``{model,optim,extra_state}_world_size_{ranks}_rank_{rank}.pt``;
- accelerate 1.15 and later with ``use_dcp=False``: ``pytorch_model_fsdp_0_rank{rank}.bin`` and
  ``optimizer_0_rank{rank}.bin``;
- scripts: ``{anything}rank{rank}.pt``, ``.pth`` or ``.bin``, of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.formats.dtensors import Mesh, Place, place_of
from mmfsdp.checkpoint.formats.registry import Source
from mmfsdp.checkpoint.formats.torch_zip import PickledDTensor, PickledShards, PickledTensor, add_whole, read_tree
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.tree import find_leaves, listed, map_leaves, unique_name
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["read", "read_files"]

_NAME = re.compile(
    r"(?P<kind>.*?)(?:[_.-](?P<index>\d+))?(?:[_.-]?world_size_(?P<world>\d{1,9}))?[_.-]?rank[_-]?(?P<rank>\d{1,9})"
    r"\.(?:pt|pth|bin)",
    re.ASCII,
)
_KEYS = {
    "model": "state_dict",
    "pytorch_model_fsdp": "state_dict",
    "optim": "optimizer",
    "optimizer": "optimizer",
    "extra_state": "extra_state",
}
"""Under which key of the checkpoint the content of a kind of files goes."""
_OF_EACH_RANK = ("extra_state",)
"""Kinds whose content is each rank's own, such as the state of random number generators: a list by rank."""


@dataclass(frozen=True)
class _File:
    path: Path
    rank: int
    tree: Any
    tensors: Mapping[str, PickledDTensor]  # by path in the tree
    places: Mapping[str, Place]


def read(source: Source) -> Layout:
    """Read the layout of a directory of such files.

    Raises:
        CheckpointNotFoundError: There is no such file.
        IncompleteCheckpointError: Files of some ranks are missing; they are named.
        CorruptCheckpointError: A file is of another save, or damaged.
        FormatError: There are kinds of files that are not known, or a file holds no DTensor.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    kinds: dict[str, dict[int, Path]] = {}
    for name in source.names:
        if (match := _NAME.fullmatch(name)) is None:
            continue
        key = _KEYS.get(match["kind"], match["kind"])
        key = f"{key}_{match['index']}" if int(match["index"] or 0) else key
        files = kinds.setdefault(key, {})
        rank, path = int(match["rank"]), inside(source.path, name, source.path)
        if rank in files:
            raise CorruptCheckpointError(
                f"{source.path.name} holds two files of rank {rank}: {files[rank].name} and {name}. One is left over "
                "from another save; remove it.",
                file=str(path),
            )
        files[rank] = path
    if not kinds:
        raise CheckpointNotFoundError(f"{source.path.name} holds no file of a rank.", file=str(source.path))
    if len(kinds) == 1:
        [files] = kinds.values()
        return read_files(source.path, files, trust=source.trust)
    unknown = [kind for kind in kinds if not any(kind == key or kind.startswith(f"{key}_") for key in _KEYS.values())]
    if unknown:
        raise FormatError(
            f"{source.path.name} holds files of {len(kinds)} kinds, of which {listed(unknown)} is not known. Move the "
            "files of one kind into a directory of their own.",
            file=str(source.path),
        )
    return _layout(source.path, {key: _read(files, source.trust) for key, files in kinds.items()})


def read_files(directory: Path, files: Mapping[int, Path], *, trust: bool = False) -> Layout:
    """Read the layout of files of one kind, given by rank; see `read`."""
    return _layout(directory, {None: _read(files, trust)})


def _read(files: Mapping[int, Path], trust: bool) -> list[_File]:
    found = []
    for rank, path in sorted(files.items()):
        tree = read_tree(path, trust=trust)
        tensors, meshes = dict(find_leaves(tree, PickledDTensor)), dict[Any, Mesh]()
        places = {name: place_of(tensor, meshes) for name, tensor in tensors.items()}
        found.append(_File(path, rank, tree, tensors, places))
    return found


def _layout(directory: Path, kinds: Mapping[str | None, list[_File]]) -> Layout:
    """Return the layout of files by kind; ``None`` is the only one, whose content is that of the checkpoint."""
    if not any(file.tensors for files in kinds.values() for file in files):
        path = next(iter(kinds.values()))[0].path
        raise FormatError(
            f"{path.name} holds no DTensor, so that nothing says which part of which tensor it has. Save the model "
            "with torch's distributed checkpoint (DCP), or whole by one rank.",
            file=str(path),
        )
    tensors: dict[str, TensorEntry] = {}
    content: dict[str, Any] = {}
    for key, files in kinds.items():
        if key in _OF_EACH_RANK:
            content[str(key)] = [_own(f"{key}/{place}", file, tensors) for place, file in enumerate(files)]
        else:
            tree = _shared(f"{key}/" if key else "", files, tensors)
            if key is None:
                return Layout(directory, "dtensor_ranks", len(files), tensors, tree)
            content[key] = tree
    return Layout(directory, "dtensor_ranks", max(map(len, kinds.values())), tensors, content)


def _own(prefix: str, file: _File, tensors: dict[str, TensorEntry]) -> Any:
    """Return the content of one rank's file, whose tensors are its own."""

    def bind(name: str, leaf: Any) -> Any:
        return add_whole(f"{prefix}/{name}", leaf, tensors) if isinstance(leaf, PickledTensor) else leaf

    return map_leaves(file.tree, bind)


def _shared(prefix: str, files: list[_File], tensors: dict[str, TensorEntry]) -> Any:
    """Return the content that the files of all ranks make up; the first gives it its structure."""
    first = files[0]
    for file in files[1:]:
        if extra := [name for name in file.tensors if name not in first.tensors]:
            raise IncompleteCheckpointError(
                f"Tensor {extra[0]!r} is in {file.path.name} but not in {first.path.name}, which gives the checkpoint "
                "its structure. Files of pipeline stages cannot be put together.",
                file=str(first.path),
            )

    def bind(name: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledShards):
            raise FormatError(
                f"{first.path.name} holds a ShardedTensor of FSDP1 beside DTensors, at {name!r}.", file=str(first.path)
            )
        if isinstance(leaf, PickledTensor):
            return add_whole(prefix + name, leaf, tensors)
        if not isinstance(leaf, PickledDTensor):
            return leaf
        unique = unique_name(prefix + name, tensors)
        tensors[unique] = _sharded(unique, name, leaf, files)
        return TensorRef(unique, leaf.local.parameter)

    return map_leaves(first.tree, bind)


def _sharded(unique: str, name: str, first: PickledDTensor, files: list[_File]) -> TensorEntry:
    """Return a tensor with the boxes of all ranks of its mesh."""
    by_rank = {file.rank: file for file in files}
    ranks = files[0].places[name].ranks
    missing = [rank for rank in ranks if rank not in by_rank]
    if missing:
        like = files[0].path.name.replace(f"rank{files[0].rank}", "rank{}").replace(f"rank_{files[0].rank}", "rank_{}")
        names = [like.format(rank) for rank in missing[:8]]
        raise IncompleteCheckpointError(
            f"Tensor {name!r} was sharded over {len(ranks)} ranks, but {', '.join(names)} "
            f"{f'and {len(missing) - 8} more ' if len(missing) > 8 else ''}"
            f"{'is' if len(missing) == 1 else 'are'} missing.",
            file=str(files[0].path.with_name(names[0])),
        )
    chunks: dict[Any, Chunk] = {}
    for rank in ranks:
        file = by_rank[rank]
        held, place = file.tensors.get(name), file.places.get(name)
        if held is None or place is None:
            raise IncompleteCheckpointError(f"{file.path.name} lacks tensor {name!r}.", file=str(file.path))
        if place.rank != rank or len(place.ranks) != len(ranks):
            raise CorruptCheckpointError(
                f"{file.path.name} was written by rank {place.rank} of {len(place.ranks)} (expected rank {rank} of "
                f"{len(ranks)}): it is of another save.",
                file=str(file.path),
            )
        if held.shape != first.shape or held.local.dtype != first.local.dtype:
            raise CorruptCheckpointError(
                f"Tensor {name!r} is {first.local.dtype} of shape {list(first.shape)} in {files[0].path.name} but "
                f"{held.local.dtype} of shape {list(held.shape)} in {file.path.name}.",
                file=str(file.path),
            )
        chunk = held.local.chunk(place.box[0])
        # Ranks that replicate hold the same box: the first will do. An empty box holds nothing.
        if chunk.numel:
            chunks.setdefault(chunk.bounds, chunk)
    return TensorEntry(unique, first.local.dtype, first.shape, tuple(chunks.values()))
