"""Sends a part of a tensor that several ranks hold from the one that read it to the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.collective.broadcasting import broadcast_along

__all__ = ["Replicas", "replicas_of"]


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same part of a tensor, and the one among them that reads it."""

    mesh: DeviceMesh
    """The mesh that the tensor is placed on."""
    reader: dict[int, int]
    """For each dimension of the mesh that the tensor is replicated along, the reader's rank along it."""

    @property
    def reads(self) -> bool:
        """Whether this rank is the reader."""
        return all(self.mesh.get_local_rank(dim) == rank for dim, rank in self.reader.items())

    def send(self, part: torch.Tensor) -> None:
        """Copy the reader's values to the other ranks. Collective: every rank that holds the part.

        Args:
            part: What this rank holds of the tensor, on its device.
        """
        ahead = dict(self.reader)
        for dim, rank in self.reader.items():
            del ahead[dim]
            # Along the dimensions still ahead, only ranks with the reader's coordinates receive now.
            if all(self.mesh.get_local_rank(other) == at for other, at in ahead.items()):
                broadcast_along(part, self.mesh, dim, rank)


def replicas_of(tensor: torch.Tensor, mesh: DeviceMesh, number: int) -> Replicas:
    """Return which ranks hold the same part of a tensor. Not collective.

    Args:
        tensor: A DTensor, or a plain tensor that every rank of ``mesh`` holds.
        mesh: The model's mesh.
        number: Counts the tensors, so that ranks take turns at reading; the same on every rank.
    """
    dims = [*range(mesh.ndim)]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        dims = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    reader: dict[int, int] = {}
    for dim in dims:
        if mesh.size(dim) > 1:
            number, reader[dim] = divmod(number, mesh.size(dim))
    return Replicas(mesh, reader)
