"""Reads any box of a tensor from the files of ranks on a node's own disk, and says which of them a rank needs."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import Bounds, EvenBoxes, meet
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.checkpoint.formats.torch_files.torch_zip import read_tree
from mmfsdp.checkpoint.tree import leaves, map_leaves
from mmfsdp.collective.scopes import rank_in
from mmfsdp.errors import CorruptCheckpointError
from mmfsdp.runtime.dtensors import box_of
from mmfsdp.saving.reading.content import restricted_load
from mmfsdp.state.lazy_tensors import LazyTensor, TensorSource, Wanted

__all__ = ["NodeShards", "boxes_of_rank", "header_of", "needed_owners"]

_MOST_REPLICAS = 64  # that are looked at for one whose file is on this node


def header_of(path: Path) -> dict[str, Any]:
    """Return the shapes and placements of the tensors in a rank's file, and the mesh. Not collective.

    Raises:
        CheckpointError: The file cannot be read.
    """
    header: dict[str, Any] = read_tree(path, trust=True)["mmfsdp"]
    return header


def boxes_of_rank(header: Mapping[str, Any], mesh: DeviceMesh, weights: Mapping[str, Any]) -> dict[str, Bounds]:
    """Return the box of each tensor that this rank will read. Not collective.

    Optimizer state lies as its parameter does. Where the weights do not lie as they did when they were saved, all of
    each tensor counts.

    Args:
        header: What the file of a rank says of its tensors.
        mesh: The ranks that read.
        weights: The model's weights by name, as they lie now.
    """
    shapes = {path: tuple(said["shape"]) for path, said in header["tensors"].items()}
    if len(header["mesh"]) == mesh.ndim:
        found = {
            path: _rule(said, tuple(mesh.shape)).held_by(rank_in(mesh)) for path, said in header["tensors"].items()
        }
        own = {f"state_dict/{name}": box_of(leaf).bounds for name, leaf in weights.items() if isinstance(leaf, DTensor)}
        if all(found.get(path, box) == box for path, box in own.items()):
            return found
    return {path: ((0,) * len(shape), shape) for path, shape in shapes.items()}


def needed_owners(header: Mapping[str, Any], boxes: Mapping[str, Bounds], near: Collection[int]) -> set[int]:
    """Return the ranks that saved the contents of some boxes. Not collective.

    Args:
        header: See `boxes_of_rank`.
        boxes: A box of each tensor.
        near: The ranks whose files are on this node, which count first among those that saved the same.
    """
    found: set[int] = set()
    mesh = tuple(header["mesh"])
    for path, box in boxes.items():
        rule = _rule(header["tensors"][path], mesh)
        rules = (replace(rule, replica=replica) for replica in range(min(rule.replicas, _MOST_REPLICAS)))
        for owners in zip(*(rule.meeting(box).values() for rule in rules), strict=True):
            if found.isdisjoint(owners):
                found.add(next((owner for owner in owners if owner in near), owners[0]))
    return found


def _rule(said: Mapping[str, Any], mesh: tuple[int, ...]) -> EvenBoxes:
    mesh = tuple(said.get("mesh", mesh))
    return EvenBoxes(tuple(said["shape"]), mesh, tuple(said["placements"]), 0, tuple(said.get("order", ())))


class NodeShards(TensorSource):
    """The files of some ranks. They are mapped into memory, and each rank has its own: no method is for other ranks.

    Args:
        paths: The file of each of these ranks.
        own: The rank whose file gives everything but shards.
        safe_globals: See `restricted_load`.

    Attributes:
        content: The content, with each shard as a `LazyTensor`.

    Raises:
        CheckpointError: A file is damaged, or holds objects of other classes.
    """

    is_shared = False

    def __init__(self, paths: Mapping[int, Path], own: int, safe_globals: Iterable[Any]) -> None:
        self.key = secrets.token_hex(8)
        self._parts: dict[str, dict[Bounds, torch.Tensor]] = {}
        contents = {owner: restricted_load(path, str(path), safe_globals) for owner, path in paths.items()}
        headers = {owner: content.pop("mmfsdp")["tensors"] for owner, content in contents.items()}
        for owner, content in contents.items():
            for name, leaf in leaves(content):
                if name in headers[owner]:
                    bounds = tuple(headers[owner][name]["offsets"]), tuple(leaf.shape)
                    self._parts.setdefault(name, {})[bounds] = leaf

        def lazy(name: str, leaf: Any) -> Any:
            if name not in headers[own]:
                return leaf
            return LazyTensor(name, canonical_dtype(leaf.dtype), tuple(headers[own][name]["shape"]), self)

        self.content: dict[str, Any] = dict(map_leaves(contents[own], lazy))

    def fill(self, name: str, box: Bounds, target: memoryview) -> None:
        """Read a box of a tensor into memory, in row-major order.

        Raises:
            CorruptCheckpointError: No file here holds a part of it.
        """
        parts = self._parts[name]
        dtype = next(iter(parts.values())).dtype
        result, copied = torch.frombuffer(target, dtype=dtype).reshape(box[1]), 0
        for held, tensor in parts.items():
            if tensor.numel() and meet(held, box):
                part, target_part = _overlap(held, box)
                result[target_part] = tensor[part]
                copied += tensor[part].numel()
        if copied != result.numel():
            raise CorruptCheckpointError(
                f"The files on this node hold {copied} of the {result.numel()} elements of {name!r} that a rank reads."
            )

    def check_unchanged(self) -> None:
        """Do nothing: a file that is mapped stays as it is."""

    @property
    def is_local(self) -> bool:
        """Whether it is on disk: it is."""
        return True

    @property
    def num_records(self) -> None:
        """How many records ranks check for each other: none, as files were compared with their checksums."""
        return None

    def read_in_part(self, wanted: Sequence[Wanted]) -> list[int]:
        """Return nothing: see `num_records`."""
        return []

    def check_own(self, wanted: Sequence[Wanted], flags: Sequence[int], rank: int, count: int) -> None:
        """Do nothing: see `num_records`."""

    def find(self, requests: Sequence[Sequence[Wanted]]) -> Sequence[Any]:
        """Return nothing: each rank knows where its part lies."""
        return []

    def learn(self, wanted: Sequence[Wanted], found: Any) -> None:
        """Do nothing: see `find`."""


def _overlap(held: Bounds, box: Bounds) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the intersection of two boxes, as slices of each of them."""
    begins = [max(pair) for pair in zip(held[0], box[0], strict=True)]
    ends = [min(a + b, c + d) for a, b, c, d in zip(*held, *box, strict=True)]
    return tuple(  # type: ignore[return-value]
        tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, offsets, strict=True))
        for offsets in (held[0], box[0])
    )
