"""Which part of a whole tensor a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from mmfsdp.errors import StateDictError

__all__ = ["Box", "box_of", "local_part", "whole_tensor"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: where it starts and how far it reaches, per dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


def box_of(tensor: torch.Tensor) -> Box:
    """Return the box of the whole that this rank holds; of a plain tensor, all of it. Not collective.

    A dimension of ``d`` elements over ``n`` ranks gives rank ``r`` the elements from ``r * ceil(d / n)`` on, at most
    ``ceil(d / n)`` of them.

    Raises:
        StateDictError: A placement other than ``Shard`` and ``Replicate``.
    """
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(tuple(offsets), tuple(sizes))
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or coordinates is None:
            raise StateDictError(f"Tensors placed as {placement} have no box on a rank.")
        dim, parts, place = placement.dim, mesh.size(mesh_dim), coordinates[mesh_dim]
        chunk = -(-sizes[dim] // parts)
        start = min(chunk * place, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def local_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the view of ``whole`` that a tensor placed as ``like`` holds on this rank. Not collective."""
    return whole[box_of(like).slices]


def whole_tensor(tensor: torch.Tensor, *, cpu_offload: bool = False) -> torch.Tensor:
    """Return the whole of a tensor in memory of its own. Collective for a DTensor: every rank of its mesh."""
    value = tensor.detach()
    held = value.to_local() if isinstance(value, DTensor) else value
    gathered = value.full_tensor() if isinstance(value, DTensor) else value
    if cpu_offload and gathered.device.type != "cpu":
        return gathered.cpu()
    # What nothing had to be gathered for is the model's own memory.
    shared = gathered.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    return gathered.clone() if shared else gathered
