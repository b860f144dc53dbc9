"""Reads ``local`` checkpoints of stock MMEngine 0.8 to 0.10, one ``rank{i}.pth`` per rank, and others from FSDP1.

Each file holds what ``FSDP.state_dict`` and ``FSDP.optim_state_dict`` return under ``LOCAL_STATE_DICT``
(mmengine/_strategy/fsdp.py): this rank's part of each flat parameter, and optimizer state in shards of its true shape.
Scripts save the same, or what ``SHARDED_STATE_DICT`` gives, under other names. The files say the shapes of parameters
only through the optimizer's state: without it, they come from a reference.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmfsdp.basics.text import clean_fqn, missing
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import RANK_FILE, SourcePath
from mmfsdp.checkpoint.formats.fsdp1.flat_parameters import FLAT
from mmfsdp.checkpoint.formats.fsdp1.flat_state_dicts import ParameterFacts, known_shapes, resolve_section
from mmfsdp.checkpoint.formats.fsdp1.rank_states import own_states_by_rank
from mmfsdp.checkpoint.formats.torch_files.same_save import check_same_save
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledShards, PickledTensor, add_whole, read_tree
from mmfsdp.checkpoint.integrity import inside, regular_files
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.tree import find_leaves, map_leaves, unique_name
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["RankFiles", "read", "read_stock_files"]


class RankFiles:
    """The files of a directory that have names of rank files.

    Args:
        directory: The directory.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.
        paths: Rank to file, in order, if the names are others than MMEngine's.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: One is a link out of the directory, or not a file.
        CorruptCheckpointError: Two belong to the same rank.
    """

    def __init__(self, directory: Path, *, trust: bool = False, paths: Mapping[int, Path] | None = None) -> None:
        self.directory = directory
        self.of_mmengine = paths is None
        """Whether the files have MMEngine's names, and so its content."""
        self.paths: Mapping[int, Path] = _found(directory) if paths is None else paths
        """Rank to file, in order."""
        self.trust = trust
        """Whether unknown pickled objects are kept."""

    @functools.cached_property
    def first(self) -> tuple[Path, Any]:
        """The file of the lowest rank, and its content: a ``PickledTensor`` for each tensor."""
        path = next(iter(self.paths.values()))
        return path, read_tree(path, trust=self.trust)

    @property
    def of_mmfsdp(self) -> bool:
        """Whether the first file is one of mmfsdp, and not one of stock MMEngine."""
        tree = self.first[1]
        return not isinstance(tree, dict) or "mmfsdp" in tree

    def read(self, rank: int) -> Any:
        """Return the content of a rank's file.

        Raises:
            FormatError, UnsafePickleError, CorruptCheckpointError: It cannot be read.
        """
        path = self.paths[rank]
        return self.first[1] if path == self.first[0] else read_tree(path, trust=self.trust)


def _found(directory: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    regular = regular_files(directory)
    for name, path in sorted((path.name, path) for path in directory.iterdir()):
        match = RANK_FILE.fullmatch(name)
        if match is None:
            continue
        if name not in regular:
            inside(directory, name, directory)
        number = int(match[1])
        if number in found:
            raise CorruptCheckpointError(f"{found[number].name} and {name} are both of rank {number}.", file=str(path))
        found[number] = path
    if not found:
        raise CheckpointNotFoundError(f"{directory.name} holds no rank{{i}}.pth.", file=str(directory))
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class _LocalFile:
    path: Path
    tree: dict[Any, Any]
    shards: Mapping[str, PickledShards]  # by path in the tree


def read(source: SourcePath) -> Layout:
    """Read the layout of a ``local`` checkpoint of stock MMEngine; errors as for `read_stock_files`."""
    return read_stock_files(RankFiles(source.path, trust=source.trust), source)


def read_stock_files(files: RankFiles, source: SourcePath) -> Layout:
    """Read the layout of rank files by stock MMEngine, or of other state dicts that ranks saved from FSDP1.

    Args:
        files: The files.
        source: Its ``reference`` has the shapes (and with ``use_orig_params=False`` the order of parameters and tied
            names) that the files lack.

    Raises:
        IncompleteCheckpointError: A rank's file is missing, or shapes are unknown and the reference lacks them.
        CorruptCheckpointError: The files contradict each other.
        FormatError: A file is something else.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    ranks = _read_ranks(files)
    first = ranks[0].tree
    known = known_shapes(first.get("optimizer", first), source.reference())
    if len(ranks) > 1:
        first = own_states_by_rank(first, lambda: [rank.tree for rank in ranks])
    tree: dict[Any, Any] = {}
    if _is_section(first):
        tree = _resolved("state dict", first, [rank.tree for rank in ranks], ranks, known)
    else:
        for key, value in first.items():
            parts = [rank.tree.get(key) for rank in ranks]
            tree[key] = _resolved(key, value, parts, ranks, known) if _is_section(value) else value

    tensors: dict[str, TensorEntry] = {}

    def bind(name: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledTensor):
            return add_whole(name, leaf, tensors)
        if not isinstance(leaf, PickledShards | TensorEntry):
            return leaf
        unique = unique_name(name, tensors)
        entry = _sharded(name, ranks) if isinstance(leaf, PickledShards) else leaf
        tensors[unique] = replace(entry, name=unique)
        return TensorRef(unique)

    bound = map_leaves(tree, bind)
    return Layout(files.directory, "mmengine_local", len(ranks), tensors, bound)


def _read_ranks(files: RankFiles) -> list[_LocalFile]:
    directory, present = files.directory, files.paths
    ranks = []
    world_size = None
    for number in present:
        rank = _rank(present[number], files.read(number), files)
        ranks.append(rank)
        for name, held in rank.shards.items():
            world_size = held.world_size if world_size is None else world_size
            if (held.rank, held.world_size) != (number, world_size):
                raise CorruptCheckpointError(
                    f"{rank.path.name} holds the part of rank {held.rank} of {held.world_size} of {name!r} (expected "
                    f"rank {number} of {world_size}).",
                    file=str(rank.path),
                )
    expected = len(present) if world_size is None else world_size
    like = next(iter(present.values())).name
    numbers = range(min(expected, len(present) + 8))
    absent = [re.sub(r"\d+(?=\D*$)", str(number), like) for number in numbers if number not in present]
    if absent:
        raise IncompleteCheckpointError(
            f"{directory.name} was saved by {expected} ranks, but {missing(absent)}.",
            file=str(directory / absent[0]),
        )
    for rank in ranks[1:]:
        check_same_save(ranks[0].path, ranks[0].tree, rank.path, rank.tree)
        if files.of_mmengine and not any(part.shards for part in ranks):
            _check_whole(ranks[0], rank)
    return ranks


def _check_whole(first: _LocalFile, other: _LocalFile) -> None:
    """Raise if two files without a shard hold other weights: those of tensor-parallel ranks or pipeline stages.

    FSDP's NO_SHARD gives every rank the same weights. A buffer may differ, so one matrix alone says nothing.
    """
    ours, theirs = (dict(find_leaves(file.tree["state_dict"], PickledTensor)) for file in (first, other))
    matrices = [name for name, held in ours.items() if len(held.shape) > 1 and name in theirs]
    differing = [name for name in matrices if _identity(ours[name]) != _identity(theirs[name])]
    if {*ours} == {*theirs} and 2 * len(differing) <= len(matrices):
        return
    name = min({*ours} ^ {*theirs}, default="") or differing[0]
    raise FormatError(
        f"{first.path.name} and {other.path.name} hold no shards of FSDP, but other weights, such as {name!r}: parts "
        "of tensors under tensor parallelism, or stages of a pipeline, and nothing says how they belong together. If "
        "one file is whole, open it instead of its directory. Otherwise save the model with torch's distributed "
        "checkpoint (DCP), or whole by one rank.",
        file=str(first.path),
    )


def _identity(held: PickledTensor) -> tuple[Any, ...]:
    return held.dtype, held.shape, held.offset - held.record.offset, held.record.nbytes, held.record.crc32


def _rank(path: Path, tree: Any, files: RankFiles) -> _LocalFile:
    if not isinstance(tree, dict) or (
        files.of_mmengine and ("mmfsdp" in tree or not isinstance(tree.get("state_dict"), dict))
    ):
        raise FormatError(
            f"{path.name} is not a rank file of stock MMEngine, though others of its directory are.", file=str(path)
        )
    return _LocalFile(path, tree, dict(find_leaves(tree, PickledShards)))


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(key, str) and key.endswith(FLAT) for key in value)


def _resolved(
    key: Any, value: dict[Any, Any], parts: list[Any], ranks: list[_LocalFile], known: ParameterFacts
) -> dict[Any, Any]:
    """Return a state dict of the model, with the flat parameters that the ranks share taken apart."""
    for rank, part in zip(ranks, parts, strict=True):
        if not isinstance(part, dict) or {*part} != {*value}:
            raise CorruptCheckpointError(
                f"The keys of {str(key)!r} in {rank.path.name} are not those in {ranks[0].path.name}.",
                file=str(rank.path),
            )
    result = collections.OrderedDict(resolve_section(parts, [rank.path for rank in ranks], known))
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, dict):
        vars(result)["_metadata"] = collections.OrderedDict(
            (clean_fqn(str(name)), version) for name, version in versions.items()
        )
    return result


def _sharded(name: str, ranks: list[_LocalFile]) -> TensorEntry:
    """Put a tensor together that is stored in shards of its true shape."""
    first: PickledShards | None = None
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk] = {}
    for rank in ranks:
        held = rank.shards.get(name)
        if held is None:
            raise IncompleteCheckpointError(f"{rank.path.name} lacks its part of {name!r}.", file=str(rank.path))
        first = held if first is None else first
        if (held.dtype, held.shape) != (first.dtype, first.shape):
            raise CorruptCheckpointError(
                f"{name!r} is {held.dtype} of shape {list(held.shape)} in {rank.path.name} but {first.dtype} of shape "
                f"{list(first.shape)} in {ranks[0].path.name}.",
                file=str(rank.path),
            )
        for stored, offsets in held.parts:
            chunk = stored.chunk(offsets)
            if chunk.numel and stored.dtype == held.dtype:
                chunks.setdefault((chunk.box_offsets, chunk.box_sizes), chunk)
    assert first is not None
    return TensorEntry(name, first.dtype, first.shape, tuple(chunks.values()))
