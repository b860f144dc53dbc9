"""Reads and plans ``local`` checkpoints: ``rank0.pth`` to ``rank{N-1}.pth``, each with the boxes of its tensors.

Every file is an ordinary torch zip whose ``'mmfsdp'`` key says what the rest is part of::

    {'format': 'rank_local', 'version': 1, 'world_size': N, 'rank': i, 'save_id': str,
     'mesh': [ranks per dimension of the mesh],
     'tensors': {path: {'shape': [global shape], 'offsets': [start of the box per dimension],
                        'placements': [sharded dimension or None, per mesh dimension], 'replica': number,
                        'order': [mesh dimensions as they divide], 'mesh': [ranks per dimension, if other than above]}}}

A path joins ``str(key)`` of the nested keys with ``/``. The local tensor's own shape is the size of its box. What is
not listed is the same on all ranks, and taken from rank 0. ``'mesh'``, ``'placements'`` and ``'replica'`` (which of the
ranks that hold the same box wrote it) may be absent; with them one file says in which other file each box is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds, EvenBoxes, Ranks, sharded_box
from mmfsdp.basics.text import missing
from mmfsdp.checkpoint.chunks import Chunk, Unlocated
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import CheckpointContent, SourcePath
from mmfsdp.checkpoint.formats.per_rank.dtensor_ranks import read_files as read_dtensors
from mmfsdp.checkpoint.formats.per_rank.mmengine_local import RankFiles, read_stock_files
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledDTensor, PickledTensor, add_whole, read_tree
from mmfsdp.checkpoint.formats.torch_files.torch_zip_writer import plan_file
from mmfsdp.checkpoint.geometry import check_box
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Layout, PlannedFile, TensorRef
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest, read_manifest
from mmfsdp.checkpoint.manifest_search import check_size, find_save
from mmfsdp.checkpoint.tree import find_leaves, map_leaves, unique_name
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["plan_write", "rank_header", "read"]

_MAX_RANKS = 1_000_000  # more is damage, or malice


@dataclass(frozen=True)
class _RankFile:
    path: Path
    tree: Any
    save_id: str
    boxes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # path -> (global shape, box offsets)
    tensors: Mapping[str, PickledTensor]
    header: Mapping[str, Any]


class _RankItems:
    """Locates tensors in rank files, and reads only the files that are needed; it can be sent to other ranks."""

    def __init__(self, directory: Path, world_size: int, save_id: str, has_manifest: bool, trust: bool) -> None:
        self._of = directory, world_size, save_id, has_manifest, trust
        self._known: dict[int, _RankFile] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        return self._of

    def __setstate__(self, state: tuple[Path, int, str, bool, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def chunks(self, name: str, dtype: str, boxes: Mapping[Bounds, int]) -> tuple[Chunk, ...]:
        """Return where boxes of a tensor lie in the files of the ranks that wrote them.

        Raises:
            CheckpointError: A file is missing or damaged, of another save, or holds something else.
        """
        return tuple(self._chunk(name, dtype, box, rank) for box, rank in boxes.items())

    def _chunk(self, name: str, dtype: str, box: Bounds, rank: int) -> Chunk:
        file = self._file(rank)
        stored = file.tensors.get(name)
        if stored is None or name not in file.boxes or stored.dtype != dtype or len(stored.shape) != len(box[0]):
            raise CorruptCheckpointError(
                f"{file.path.name} does not hold tensor {name!r} of {dtype} at {list(box[0])}, as rank0.pth says.",
                file=str(file.path),
            )
        return check_box(name, stored.chunk(file.boxes[name][1]), box)

    def _file(self, rank: int) -> _RankFile:
        if rank not in self._known:
            directory, world_size, save_id, has_manifest, trust = self._of
            path = directory / f"rank{rank}.pth"
            try:
                if has_manifest:
                    check_size(directory, path.name, path.stat().st_size)
                tree = read_tree(inside(directory, path.name, directory), trust=trust)
            except FileNotFoundError as error:
                raise IncompleteCheckpointError(f"{path.name} is missing.", file=str(path)) from error
            found = _of_rank(path, tree, rank, world_size)
            _check_save(found, save_id, "rank0.pth")
            self._known[rank] = found
        return self._known[rank]


def read(source: SourcePath) -> Layout:
    """Read the layout of a directory of rank files; unless the format was chosen, stock MMEngine may have written it.

    Raises:
        IncompleteCheckpointError: Files of some ranks are missing; they are named.
        CorruptCheckpointError: Files are of different saves, or their sizes differ from the manifest.
        FormatError: The files were written by something else, such as stock MMEngine.
        UnsafePickleError: A file names something that is not on the list of safe names.
    """
    files = RankFiles(source.path, trust=source.trust)
    if not source.chosen and not files.of_mmfsdp:
        if find_leaves(files.first[1], PickledDTensor):
            return read_dtensors(source, files.paths)
        return read_stock_files(files, source)
    directory, present = files.directory, files.paths
    first, tree = files.first
    world_size = _header(first, tree)["world_size"]
    ranks = [_of_rank(first, tree, 0, world_size)] if 0 in present else []
    rules = None if source.look_up or not ranks else _rules(ranks[0])
    manifest = None
    if (directory / MANIFEST_NAME).exists():
        # The rank that opens a file compares its size, if not all of them are opened here.
        manifest = read_manifest(directory) if rules is None else find_save(directory)
    if manifest is not None and manifest.world_size != world_size:
        raise CorruptCheckpointError(
            f"{first.name} is of a save by {world_size} ranks, but {MANIFEST_NAME} of one by {manifest.world_size}.",
            file=str(first),
        )
    absent = [f"rank{rank}.pth" for rank in range(world_size) if rank not in present]
    if absent:
        raise IncompleteCheckpointError(
            f"{directory.name} was saved by {world_size} ranks, but {missing(absent)}.",
            file=str(directory / absent[0]),
        )
    stale = [present[rank].name for rank in sorted(present) if rank >= world_size]
    if stale:
        raise CorruptCheckpointError(
            f"{directory.name} was saved by {world_size} ranks, but also holds {', '.join(stale)}, left over from "
            "another save. Remove what does not belong.",
            file=str(directory / stale[0]),
        )
    if manifest is not None:
        check_manifest(directory, manifest=manifest)
    expected, origin = (ranks[0].save_id, "rank0.pth") if manifest is None else (manifest.save_id, MANIFEST_NAME)
    if rules is not None:
        _check_save(ranks[0], expected, origin)
        items = _RankItems(directory, world_size, expected, manifest is not None, files.trust)
        return _described(directory, ranks[0], rules, items)
    for number in range(1, world_size):
        ranks.append(_of_rank(present[number], files.read(number), number, world_size))
    for rank in ranks:
        _check_save(rank, expected, origin)
    return _combined(directory, ranks)


def _check_save(rank: _RankFile, expected: str, origin: str) -> None:
    if rank.save_id != expected:
        raise CorruptCheckpointError(
            f"{rank.path.name} is of another save ({rank.save_id!r}) than {origin} ({expected!r}).", file=str(rank.path)
        )


def _rules(first: _RankFile) -> dict[str, EvenBoxes] | None:
    """Return which rank wrote which box of each tensor, if the first file describes them all."""
    mesh = _sizes(first.header.get("mesh"))
    if mesh is None or math.prod(mesh) != first.header["world_size"]:
        return None
    rules = {}
    for name, said in first.header["tensors"].items():
        placements, order = said.get("placements"), said.get("order", [])
        own = _sizes(said.get("mesh", list(mesh)))
        if not isinstance(placements, list) or not isinstance(order, list) or own is None:
            return None
        rules[name] = EvenBoxes(first.boxes[name][0], own, tuple(placements), said.get("replica"), tuple(order))
        if math.prod(own) != math.prod(mesh) or not rules[name].is_valid:
            return None
    return rules


def _described(directory: Path, first: _RankFile, rules: Mapping[str, EvenBoxes], items: _RankItems) -> Layout:
    """Return the layout as the first file describes it."""

    def sharded(name: str, leaf: PickledTensor) -> TensorEntry | None:
        if name not in rules:
            return None
        stored = Unlocated(rules[name], functools.partial(items.chunks, name, leaf.dtype))
        return TensorEntry(name, leaf.dtype, rules[name].shape, stored)

    return _layout(directory, first, first.header["world_size"], sharded)


def _layout(
    directory: Path, first: _RankFile, world_size: int, sharded: Callable[[str, PickledTensor], TensorEntry | None]
) -> Layout:
    """Return the layout. A function assembles each tensor, or returns ``None`` if the first file has it whole."""
    tensors: dict[str, TensorEntry] = {}

    def bind(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, PickledTensor):
            return leaf
        entry = sharded(name, leaf)
        if entry is None:
            return add_whole(name, leaf, tensors)
        tensors[name] = entry
        return TensorRef(name, leaf.parameter)

    return Layout(directory, "rank_local", world_size, tensors, map_leaves(first.tree, bind))


def _header(path: Path, tree: Any) -> dict[str, Any]:
    header = tree.get("mmfsdp") if isinstance(tree, dict) else None
    if header is None:
        raise FormatError(
            f"{path.name} does not say which part of the checkpoint it holds, though others of its directory do: it is "
            "of another save, such as one by stock MMEngine.",
            file=str(path),
        )
    valid = (
        isinstance(header, dict)
        and header.get("format") == "rank_local"
        and all(type(header.get(key)) is int and header[key] >= 0 for key in ("version", "world_size", "rank"))
        and isinstance(header.get("save_id"), str)
        and isinstance(header.get("tensors"), dict)
    )
    if not valid or not 1 <= header["world_size"] <= _MAX_RANKS:
        raise FormatError(f"The 'mmfsdp' entry of {path.name} is malformed.", file=str(path))
    if header["version"] > 1:
        raise FormatError(
            f"{path.name} has version {header['version']} of the 'rank_local' format; this mmfsdp reads version 1. "
            "Install a newer mmfsdp.",
            file=str(path),
        )
    return dict(header)


def _of_rank(path: Path, tree: Any, rank: int, world_size: int) -> _RankFile:
    header = _header(path, tree)
    if header["rank"] != rank or header["world_size"] != world_size:
        raise CorruptCheckpointError(
            f"{path.name} holds rank {header['rank']} of {header['world_size']} (expected rank {rank} of "
            f"{world_size}).",
            file=str(path),
        )
    boxes = {}
    for name, box in header["tensors"].items():
        shape, offsets = (_sizes(box.get(key)) if isinstance(box, dict) else None for key in ("shape", "offsets"))
        if shape is None or offsets is None or len(shape) != len(offsets) or not isinstance(name, str):
            raise FormatError(f"The box of tensor {name!r} in {path.name} is malformed.", file=str(path))
        boxes[name] = (shape, offsets)
    content = {key: value for key, value in tree.items() if key != "mmfsdp"}
    tensors: dict[str, PickledTensor] = {}
    for name, leaf in find_leaves(content, PickledTensor):
        if name in tensors and name in boxes:
            raise FormatError(f"{path.name} holds two tensors under the path {name!r}.", file=str(path))
        tensors[name] = leaf
    for name in boxes:
        if name not in tensors:
            raise CorruptCheckpointError(f"{path.name} lists tensor {name!r} but does not hold it.", file=str(path))
    return _RankFile(path, content, header["save_id"], boxes, tensors, header)


def _sizes(value: Any) -> tuple[int, ...] | None:
    valid = isinstance(value, list | tuple) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if valid else None


def _combined(directory: Path, ranks: list[_RankFile]) -> Layout:
    layout = _layout(directory, ranks[0], len(ranks), lambda name, _: _sharded(name, ranks))
    for rank in ranks[1:]:
        for name in rank.boxes:
            if name not in layout.tensors:
                raise IncompleteCheckpointError(
                    f"Tensor {name!r} is in {rank.path.name} but not in rank0.pth, which gives the checkpoint its "
                    "structure.",
                    file=str(ranks[0].path),
                )
    return layout


def _sharded(name: str, ranks: list[_RankFile]) -> TensorEntry | None:
    holders = [rank for rank in ranks if name in rank.boxes]
    if not holders:
        return None
    first = holders[0]
    shape, dtype = first.boxes[name][0], first.tensors[name].dtype
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk] = {}
    for rank in holders:
        stored = rank.tensors[name]
        if rank.boxes[name][0] != shape or stored.dtype != dtype or len(stored.shape) != len(shape):
            raise CorruptCheckpointError(
                f"Tensor {name!r} is {dtype} of shape {list(shape)} in {first.path.name} but {stored.dtype} of shape "
                f"{list(rank.boxes[name][0])} (local {list(stored.shape)}) in {rank.path.name}.",
                file=str(rank.path),
            )
        chunk = stored.chunk(rank.boxes[name][1])
        # Hybrid sharding writes each box once per replica: the first will do. An empty box holds nothing.
        if chunk.numel:
            chunks.setdefault((chunk.box_offsets, chunk.box_sizes), chunk)
    return TensorEntry(name, dtype, shape, tuple(chunks.values()))


def plan_write(content: CheckpointContent) -> list[PlannedFile]:
    """Plan the file of each rank.

    Tensors are divided by rows, as ``fully_shard`` does; those without a dimension are whole on every rank.

    Raises:
        FormatError: Two paths in the tree are the same text, so a file could not say which one it means.
    """
    tree, ranks = content.tree, content.ranks
    if not isinstance(tree, dict) or "mmfsdp" in tree:
        raise FormatError("A checkpoint per rank is a mapping, and its key 'mmfsdp' says what each file is part of.")
    return [_plan_rank(tree, content.tensors, rank, ranks, content.save_id) for rank in range(ranks.count)]


def _plan_rank(
    tree: dict[Any, Any], tensors: Mapping[str, TensorEntry], rank: int, ranks: Ranks, save_id: str
) -> PlannedFile:
    boxes: dict[str, dict[str, Any]] = {}
    held: dict[str, TensorEntry] = {}

    def localise(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        entry = tensors[leaf.name]
        if not entry.shape:
            held[leaf.name] = entry
            return leaf
        if unique_name(path, boxes) != path:
            raise FormatError(f"Two tensors lie at {path!r}; a checkpoint per rank could not tell them apart.")
        offsets, sizes = sharded_box(entry.shape, [ranks.shards], [0], [ranks.shard(rank)])
        boxes[path] = {"shape": list(entry.shape), "offsets": list(offsets), "placements": [None, 0], "replica": 0}
        held[leaf.name] = entry.cut(offsets, sizes)
        return leaf

    content = map_leaves(tree, localise)
    content["mmfsdp"] = rank_header(boxes, rank, (ranks.replicas, ranks.shards), save_id)
    return plan_file(f"rank{rank}.pth", content, held)


def rank_header(boxes: Mapping[str, Mapping[str, Any]], rank: int, mesh: Sequence[int], save_id: str) -> dict[str, Any]:
    """Return what a rank's file says under ``'mmfsdp'``.

    Args:
        boxes: By path, shape and offsets of each tensor, and where they are known placements and replica.
        rank: The rank.
        mesh: Ranks per mesh dimension.
        save_id: Identifies the save.
    """
    return {
        "format": "rank_local",
        "version": 1,
        "world_size": math.prod(mesh),
        "rank": rank,
        "save_id": save_id,
        "mesh": list(mesh),
        "tensors": dict(boxes),
    }
