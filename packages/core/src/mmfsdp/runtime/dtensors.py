"""Tells which part of a whole tensor a rank holds, and gathers whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from mmfsdp.basics.boxes import Bounds, sharded_box
from mmfsdp.errors import StateDictError

__all__ = ["Box", "box_of", "local_part", "placements_of", "whole_tensor"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: its offset and size per dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bounds(self) -> Bounds:
        """The box as plain offsets and sizes."""
        return self.offsets, self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


def box_of(tensor: torch.Tensor) -> Box:
    """Return the box that this rank holds of the whole tensor; a plain tensor is held whole. Not collective.

    It follows the rule of `mmfsdp.basics.boxes.sharded_box`.

    Raises:
        StateDictError: The tensor has a placement other than ``Shard`` and ``Replicate``.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise StateDictError(f"This rank is not in the mesh of a tensor of shape {tuple(tensor.shape)}: {mesh}.")
    return Box(*sharded_box(tensor.shape, mesh.shape, placements_of(tensor), coordinates))


def placements_of(tensor: DTensor) -> list[int | None]:
    """Return the tensor dimension that each mesh dimension shards, or None where it replicates. Not collective.

    Raises:
        StateDictError: The tensor has a placement other than ``Shard`` and ``Replicate``.
    """
    for placement in tensor.placements:
        if not isinstance(placement, Replicate) and type(placement) is not Shard:
            raise StateDictError(f"A rank holds no box of a tensor placed as {placement}; use Shard or Replicate.")
    return [placement.dim if isinstance(placement, Shard) else None for placement in tensor.placements]


def local_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the view of ``whole`` that this rank holds of a tensor placed as ``like``. Not collective."""
    return whole[box_of(like).slices]


def whole_tensor(tensor: torch.Tensor, *, cpu_offload: bool = False) -> torch.Tensor:
    """Return the whole tensor in memory of its own. Collective for a DTensor: every rank of its mesh."""
    value = tensor.detach()
    held = value.to_local() if isinstance(value, DTensor) else value
    gathered = value.full_tensor() if isinstance(value, DTensor) else value
    if cpu_offload and gathered.device.type != "cpu":
        return gathered.cpu()
    # If nothing had to be gathered, the result is the model's own memory.
    shared = gathered.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    return gathered.clone() if shared else gathered
