"""Reads a directory with a file of ``torch.save`` per rank that holds DTensors: what FSDP2 gives as a state dict.

The files are named as their writer likes, with the rank at the end. Those known here:

- verl and SkyRL: ``{model,optim,extra_state}_world_size_{ranks}_rank_{rank}.pt``;
- accelerate 1.15 and later with ``use_dcp=False``: ``pytorch_model_fsdp_0_rank{rank}.bin`` and
  ``optimizer_0_rank{rank}.bin``;
- scripts: ``{anything}rank{rank}.pt``, ``.pth`` or ``.bin``, of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.text import missing
from mmfsdp.checkpoint.chunks import Chunk, Unlocated
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import SourcePath
from mmfsdp.checkpoint.formats.fsdp1.rank_states import own_states_by_rank
from mmfsdp.checkpoint.formats.per_rank.pickled_dtensors import HeldShard, Mesh, boxes_of, shard_of
from mmfsdp.checkpoint.formats.torch_files.same_save import check_same_save
from mmfsdp.checkpoint.formats.torch_files.torch_zip import (
    PickledDTensor,
    PickledShards,
    PickledTensor,
    add_whole,
    read_tree,
)
from mmfsdp.checkpoint.geometry import check_box
from mmfsdp.checkpoint.integrity import add_rank_file, inside
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import find_leaves, listed, map_leaves, unique_name
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["FileOfRank", "FilesOfRanks", "own_content", "read", "read_files", "shared_content"]

_NAME = re.compile(
    r"(?P<kind>.*?)(?:[_.-](?P<index>\d+))?(?:[_.-]?world_size_(?P<size>\d{1,9}))?[_.-]?rank[_-]?(?P<rank>\d{1,9})"
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
"""Kind of files to the key of the checkpoint under which their content goes."""
_OF_EACH_RANK = ("extra_state",)
"""Kinds whose content is each rank's own, such as the state of random number generators: a list by rank."""


@dataclass(frozen=True)
class FileOfRank:
    """A rank's file of one kind, as read."""

    path: Path
    """The file."""
    rank: int
    """The rank that its name says."""
    tree: Any
    """Its nested content."""
    tensors: Mapping[str, PickledDTensor]
    """The DTensors in it by their path in the content."""
    shards: Mapping[str, HeldShard]
    """Their boxes in the whole tensors."""
    meshes: dict[Any, Mesh]
    """The meshes that they name."""


class FilesOfRanks:
    """The files of one kind, by rank. Each is read when it is asked for; it can be sent to other ranks.

    Args:
        paths: Rank to file.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.
        name: What the content is called, if it may be a counter such as ``'step'``.
    """

    def __init__(self, paths: Mapping[int, Path], trust: bool, name: str = "") -> None:
        self.paths, self._trust, self._name = dict(sorted(paths.items())), trust, name
        self._known: dict[int, FileOfRank] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        return self.paths, self._trust, self._name

    def __setstate__(self, state: tuple[Mapping[int, Path], bool, str]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def first(self) -> FileOfRank:
        """The file of the lowest rank, which gives the checkpoint its structure."""
        return self.of(next(iter(self.paths)))

    def all(self) -> list[FileOfRank]:
        """Read all of them."""
        return [self.of(rank) for rank in self.paths]

    def of(self, rank: int) -> FileOfRank:
        """Return the file of a rank.

        Raises:
            CorruptCheckpointError: It is damaged, or of another save than the first file.
        """
        if rank not in self._known:
            path = self.paths[rank]
            tree = read_tree(path, trust=self._trust)
            if rank != min(self.paths):
                check_same_save(self.first.path, self.first.tree, path, tree, self._name)
            tensors, meshes = dict(find_leaves(tree, PickledDTensor)), dict[Any, Mesh]()
            shards = {name: shard_of(tensor, meshes) for name, tensor in tensors.items()}
            self._known[rank] = FileOfRank(path, rank, tree, tensors, shards, meshes)
        return self._known[rank]

    def locate(self, name: str, owners: tuple[int, ...], boxes: Mapping[Bounds, int]) -> tuple[Chunk, ...]:
        """Return where boxes of a tensor are in the files of the ranks that hold them.

        Raises:
            CheckpointError: A file is missing or damaged, of another save, or holds something else.
        """
        return tuple(check_box(name, self.chunk(name, owners[index], len(owners)), box) for box, index in boxes.items())

    def chunk(self, name: str, rank: int, ranks: int) -> Chunk:
        """Return what a rank of ``ranks`` holds of a tensor; see `locate` for errors."""
        file, first = self.of(rank), self.first
        held, shard = file.tensors.get(name), file.shards.get(name)
        if held is None or shard is None:
            raise IncompleteCheckpointError(f"{file.path.name} lacks tensor {name!r}.", file=str(file.path))
        if shard.rank != rank or len(shard.ranks) != ranks:
            raise CorruptCheckpointError(
                f"{file.path.name} was written by rank {shard.rank} of {len(shard.ranks)} (expected rank {rank} of "
                f"{ranks}): it is of another save.",
                file=str(file.path),
            )
        like = first.tensors[name]
        if held.shape != like.shape or held.local.dtype != like.local.dtype:
            raise CorruptCheckpointError(
                f"Tensor {name!r} is {like.local.dtype} of shape {list(like.shape)} in {first.path.name} but "
                f"{held.local.dtype} of shape {list(held.shape)} in {file.path.name}.",
                file=str(file.path),
            )
        return held.local.chunk(shard.box[0])


def read(source: SourcePath) -> Layout:
    """Read the layout of a directory of such files.

    Raises:
        CheckpointNotFoundError: There is no such file.
        IncompleteCheckpointError: Files of some ranks are missing; they are named.
        CorruptCheckpointError: A file is of another save, or damaged.
        FormatError: There are kinds of files that are not known, or a file holds no DTensor.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    kinds: dict[str, dict[int, Path]] = {}
    sizes: set[str | None] = set()
    for name in source.names:
        if (match := _NAME.fullmatch(name)) is None:
            continue
        key = _KEYS.get(match["kind"], match["kind"])
        key = f"{key}_{match['index']}" if int(match["index"] or 0) else key
        files = kinds.setdefault(key, {})
        sizes.add(match["size"])
        add_rank_file(files, int(match["rank"]), inside(source.path, name, source.path))
    if not kinds:
        raise CheckpointNotFoundError(f"{source.path.name} holds no file of a rank.", file=str(source.path))
    if len(kinds) == 1:
        [files] = kinds.values()
        return read_files(source, files, whole=sizes == {"1"})
    unknown = [kind for kind in kinds if not any(kind == key or kind.startswith(f"{key}_") for key in _KEYS.values())]
    if unknown:
        raise FormatError(
            f"{source.path.name} holds files of {len(kinds)} kinds, of which {listed(unknown)} is not known. If each "
            f"file is a whole checkpoint, open one of them, such as {_first_name(kinds[unknown[-1]])!r}. Otherwise "
            "move the files of one kind into a directory of their own.",
            file=str(source.path),
        )
    found: dict[str | None, FilesOfRanks] = {key: FilesOfRanks(files, source.trust) for key, files in kinds.items()}
    return _layout(source, found, whole=sizes == {"1"})


def _first_name(files: Mapping[int, Path]) -> str:
    return min(files.items())[1].name


def read_files(source: SourcePath, files: Mapping[int, Path], *, whole: bool = False) -> Layout:
    """Read the layout of files of one kind, given by rank; see `read`. ``whole``: one rank wrote them."""
    return _layout(source, {None: FilesOfRanks(files, source.trust)}, whole=whole)


def _layout(source: SourcePath, kinds: Mapping[str | None, FilesOfRanks], *, whole: bool) -> Layout:
    """Return the layout of files by kind; ``None`` is the only one, and its content is the whole checkpoint's.

    One rank needs no DTensors: what FSDP1 saves then is whole.
    """
    sharded = any(files.first.tensors for files in kinds.values())
    if not sharded and len(kinds) == 1:
        [some] = kinds.values()
        if any(find_leaves(some.first.tree, PickledShards)):
            from mmfsdp.checkpoint.formats.per_rank.mmengine_local import RankFiles, read_stock_files

            return read_stock_files(RankFiles(source.path, trust=source.trust, paths=some.paths), source)
    if not sharded and not whole:
        first = kinds.get("state_dict", next(iter(kinds.values()))).first
        path = first.path
        if any(find_leaves(first.tree, PickledShards)):
            raise FormatError(
                f"{path.name} holds ShardedTensors of FSDP1, and {path.parent.name} files of {len(kinds)} kinds. Move "
                "the files of each kind into a directory of their own, and read each.",
                file=str(path),
            )
        raise FormatError(
            f"{path.name} holds no DTensor, so that nothing says which part of which tensor it has. If the file is "
            "whole, open it instead of its directory. Otherwise save the model with torch's distributed checkpoint "
            "(DCP), or whole by one rank.",
            file=str(path),
        )
    tensors: dict[str, TensorEntry] = {}
    content: dict[str, Any] = {}
    present = {rank for files in kinds.values() for rank in files.paths}
    for key, files in kinds.items():
        if not files.first.tensors:  # DTensors say themselves which ranks there were
            _check_present(files, sorted(present), f"{source.path.name} was saved by {len(present)} ranks")
        if key in _OF_EACH_RANK:
            content[str(key)] = [own_content(f"{key}/{index}", file, tensors) for index, file in enumerate(files.all())]
        else:
            tree = shared_content(f"{key}/" if key else "", files, tensors, look_up=source.look_up)
            if key is None:
                return Layout(source.path, "dtensor_ranks", len(files.paths), tensors, tree)
            content[key] = tree
    ranks = max(len(files.paths) for files in kinds.values())
    return Layout(source.path, "dtensor_ranks", ranks, tensors, content)


def own_content(prefix: str, file: FileOfRank, tensors: dict[str, TensorEntry]) -> Any:
    """Return the content of one rank's file, whose tensors are its own."""

    def bind(name: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledDTensor | PickledShards):
            raise FormatError(
                f"{file.path.name} holds a part of the tensor {name!r}, but those of other ranks hold none: "
                "it is of another save, or of another kind.",
                file=str(file.path),
            )
        return add_whole(f"{prefix}/{name}".rstrip("/"), leaf, tensors) if isinstance(leaf, PickledTensor) else leaf

    return map_leaves(file.tree, bind)


def shared_content(prefix: str, files: FilesOfRanks, tensors: dict[str, TensorEntry], *, look_up: bool) -> Any:
    """Return the content that the files of all ranks make up; the first gives it its structure.

    Optimizer state that is each rank's own is a list by rank.
    """
    first = files.first
    for file in files.all() if look_up else ():
        if extra := [name for name in file.tensors if name not in first.tensors]:
            raise IncompleteCheckpointError(
                f"Tensor {extra[0]!r} is in {file.path.name} but not in {first.path.name}, which gives the checkpoint "
                "its structure. Files of pipeline stages cannot be put together.",
                file=str(first.path),
            )
        _check_left_over(file, first)

    def bind(name: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledShards):
            raise FormatError(
                f"{first.path.name} holds a ShardedTensor of FSDP1 beside DTensors, at {name!r}.", file=str(first.path)
            )
        if isinstance(leaf, PickledTensor):
            return add_whole((prefix + name).rstrip("/"), leaf, tensors)
        if not isinstance(leaf, PickledDTensor):
            return leaf
        unique = unique_name((prefix + name).rstrip("/"), tensors)
        stored = _chunks(name, files) if look_up else _unlocated(name, files)
        tensors[unique] = TensorEntry(unique, leaf.local.dtype, leaf.shape, stored)
        return TensorRef(unique, leaf.local.parameter)

    tree = first.tree
    if len(files.paths) > 1:
        tree = own_states_by_rank(tree, lambda: [file.tree for file in files.all()])
    return map_leaves(tree, bind)


def _chunks(name: str, files: FilesOfRanks) -> tuple[Chunk, ...]:
    """Return the boxes of a tensor that all ranks of its mesh hold."""
    ranks = _present(name, files)
    chunks: dict[Bounds, Chunk] = {}
    for rank in ranks:
        chunk = files.chunk(name, rank, len(ranks))
        # Ranks that replicate hold the same box: the first will do. An empty box holds nothing.
        if chunk.numel:
            chunks.setdefault(chunk.bounds, chunk)
    return tuple(chunks.values())


def _unlocated(name: str, files: FilesOfRanks) -> Unlocated:
    """Return the boxes of a tensor as the first file describes them, without reading the others."""
    _present(name, files)
    boxes, owners = boxes_of(files.first.tensors[name], files.first.meshes)
    return Unlocated(boxes, partial(files.locate, name, owners))


def _present(name: str, files: FilesOfRanks) -> tuple[int, ...]:
    """Return the ranks over which a tensor is sharded, after checking that all have a file."""
    ranks = files.first.shards[name].ranks
    _check_present(files, ranks, f"Tensor {name!r} was sharded over {len(ranks)} ranks")
    return ranks


def _check_present(files: FilesOfRanks, ranks: Sequence[int], why: str) -> None:
    """Raise if the file of one of these ranks is missing."""
    path = next(iter(files.paths.values()))
    absent = [re.sub(r"\d+(?=\D*$)", str(rank), path.name) for rank in ranks if rank not in files.paths]
    if absent:
        raise IncompleteCheckpointError(f"{why}, but {missing(absent)}.", file=str(path.with_name(absent[0])))


def _check_left_over(file: FileOfRank, first: FileOfRank) -> None:
    """Raise if a file belongs to a rank that the first file's save did not have. Replicas of other meshes are fine."""
    for name, shard in file.shards.items():
        ranks = first.shards[name].ranks
        if file.rank == shard.rank not in ranks and len(shard.ranks) != len(ranks):
            raise CorruptCheckpointError(
                f"{file.path.name} is left over from another save: tensor {name!r} is sharded over {len(shard.ranks)} "
                f"ranks there, and over {len(ranks)} in {first.path.name}. Remove it.",
                file=str(file.path),
            )
