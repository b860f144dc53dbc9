"""Gathers copies of shards on the first rank, over a group that training does not use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from mmfsdp.basics.boxes import Bounds, sharded_box
from mmfsdp.checkpoint.tree import leaves, map_leaves
from mmfsdp.collective.broadcasting import as_bytes
from mmfsdp.collective.channels import naming_lost_ranks
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.runtime.dtensors import placements_of
from mmfsdp.state.model import whole

__all__ = ["gather_on_first", "with_boxes"]


def with_boxes(content: Mapping[str, Any], *, rows_only: bool, is_first: bool) -> dict[str, Any]:
    """Return content in which each shard is a box of its tensor. Collective: every rank of the tensors' meshes.

    Other tensors, such as those of tensor parallelism, are gathered at once over their own mesh.

    Args:
        content: Nested dicts and lists, with DTensors where tensors are sharded. Not changed.
        rows_only: Only boxes of whole rows count.
        is_first: Whether this is the first rank, which keeps what is gathered; others get a tensor without memory.
    """

    def gathered(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor) or _is_box(leaf, rows_only):
            return leaf
        value = whole(leaf, is_first)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if value is None else value

    return dict(map_leaves(dict(content), gathered))


def _is_box(tensor: DTensor, rows_only: bool) -> bool:
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return False
    return not rows_only or (tensor.dim() > 0 and all(dim in (0, None) for dim in placements_of(tensor)))


def gather_on_first(content: Mapping[str, Any], group: dist.ProcessGroup, scope: Scope) -> dict[str, Any]:
    """Return content with whole tensors on the first rank; on others what it is does not matter. Collective.

    The first rank receives each shard once, one at a time, and holds all whole tensors.

    Args:
        content: What `with_boxes` returned, in CPU memory.
        group: A group of the ranks with a CPU backend.
        scope: The same ranks.

    Raises:
        MmfsdpError: The first rank has not enough memory; raised on every rank.
        LostRankError: A rank is gone.
    """
    shards = {path: leaf for path, leaf in leaves(content) if isinstance(leaf, DTensor)}

    def reserve() -> dict[str, torch.Tensor]:
        if not scope.is_first:
            return {}
        return {path: torch.empty(leaf.shape, dtype=leaf.dtype) for path, leaf in shards.items()}

    targets = on_all_ranks(reserve, scope)
    first, own = dist.get_global_rank(group, 0), dist.get_rank()
    with naming_lost_ranks("ranks sent their shards to the first one"):
        for path, leaf in shards.items():
            boxes = _boxes(leaf)
            if first not in leaf.device_mesh.mesh:
                continue  # another mesh, such as that of replicas, has the same tensor
            local = leaf.to_local().detach()
            if not scope.is_first:
                if own in boxes and local.numel():
                    dist.send(as_bytes(local.contiguous()), first, group=group)
                continue
            for rank, (offsets, sizes) in boxes.items():
                part = targets[path][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
                if rank == own:
                    part.copy_(local)
                elif math.prod(sizes):
                    received = part if part.is_contiguous() else torch.empty(sizes, dtype=leaf.dtype)
                    dist.recv(as_bytes(received), rank, group=group)
                    if received is not part:
                        part.copy_(received)
    return dict(map_leaves(dict(content), lambda path, leaf: targets.get(path, leaf)))


def _boxes(tensor: DTensor) -> dict[int, Bounds]:
    """Return the box of each global rank that sends its part: of several with the same part, the first."""
    mesh, dims = tensor.device_mesh, placements_of(tensor)
    found = {}
    for number, rank in enumerate(mesh.mesh.flatten().tolist()):
        coordinates: list[int] = []
        for size in reversed(mesh.shape):
            number, coordinate = divmod(number, size)
            coordinates.insert(0, coordinate)
        if not any(at for at, dim in zip(coordinates, dims, strict=True) if dim is None):
            found[rank] = sharded_box(tensor.shape, mesh.shape, dims, tuple(coordinates))
    return found
