"""Broadcasts a tensor of any dtype over a mesh, as bytes: gloo has no float8, int16 or uint16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["as_bytes", "broadcast_along", "broadcast_tensor"]


def broadcast_tensor(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Copy the first rank's values to every rank of a mesh. Collective: every rank, with equal shape and dtype.

    Args:
        tensor: A tensor of any shape, dtype and strides.
        mesh: The ranks; the tensor is sent over one dimension at a time, the last one first.
    """
    for dim in reversed(range(mesh.ndim)):
        broadcast_along(tensor, mesh, dim, 0)


def broadcast_along(tensor: torch.Tensor, mesh: DeviceMesh, dim: int, coordinate: int) -> None:
    """Copy one rank's values to those beside it along a dimension of a mesh. Collective: these ranks.

    Args:
        tensor: A tensor of any shape, dtype and strides, with equal shape and dtype on all of them.
        mesh: The mesh.
        dim: The dimension of the mesh.
        coordinate: The coordinate of the rank along it.
    """
    group = mesh.get_group(dim)
    if dist.get_world_size(group) == 1:
        return
    value = tensor.detach()
    sent = value if value.is_contiguous() else value.contiguous()
    dist.broadcast(as_bytes(sent), src=dist.get_global_rank(group, coordinate), group=group)
    if sent is not value:
        value.copy_(sent)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a one-dimensional uint8 tensor."""
    return tensor.reshape(-1).view(torch.uint8)
