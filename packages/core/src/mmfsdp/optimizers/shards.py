"""Finds which elements of flattened parameters, and which parts of a matrix, each rank of a mesh holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import sharded_box
from mmfsdp.errors import ShardStateError
from mmfsdp.optimizers.matrices import Span
from mmfsdp.runtime.dtensors import boxes_of

__all__ = ["TensorDivision", "division_of", "local_of"]


@dataclass(frozen=True, slots=True)
class TensorDivision:
    """How a tensor is divided over the ranks of a mesh. Ranks are numbered in the mesh's row-major order."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    """Ranks per dimension of the mesh."""
    is_sharded: tuple[bool, ...]
    """For each dimension of the mesh, whether it divides the rows; otherwise each rank of it holds the same."""
    order: tuple[int, ...] = ()
    """See `EvenBoxes`."""

    def span(self, rank: int) -> Span:
        """Return the elements of the flattened tensor that a rank holds."""
        placements = [0 if sharded else None for sharded in self.is_sharded]
        offsets, sizes = sharded_box(self.shape, self.mesh, placements, self._coordinates(rank), self.order)
        row = math.prod(self.shape[1:])
        return offsets[0] * row, (offsets[0] + sizes[0]) * row

    def sources(self, owner: int) -> list[int]:
        """Return the ranks that hold the tensor together with ``owner``: its replica, in order."""
        mine = self._coordinates(owner)
        found = [0]
        for size, sharded, own in zip(self.mesh, self.is_sharded, mine, strict=True):
            found = [rank * size + coordinate for rank in found for coordinate in (range(size) if sharded else [own])]
        return found

    def _coordinates(self, rank: int) -> list[int]:
        coordinates = []
        for size in reversed(self.mesh):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return coordinates[::-1]


def division_of(param: torch.Tensor, mesh: DeviceMesh | None, name: str) -> TensorDivision:
    """Return how a parameter is divided. Not collective.

    Args:
        param: A DTensor, or a plain parameter, which each rank holds whole.
        mesh: The ranks that a plain parameter is on; None if only this rank trains it.
        name: Its name, for errors.

    Raises:
        ShardStateError: It is divided along another dimension than its first.
    """
    if not isinstance(param, DTensor):
        sizes = (1,) if mesh is None else tuple(mesh.shape)
        return TensorDivision(tuple(param.shape), sizes, (False,) * len(sizes))
    boxes = boxes_of(param)
    if any(dim not in (None, 0) for dim in boxes.placements):
        raise ShardStateError(
            f"{name!r} is placed as {tuple(param.placements)}. Matrices are gathered from shards of rows: shard "
            "dimension 0, as fully_shard does, or give the parameter to another optimizer."
        )
    return TensorDivision(boxes.shape, boxes.mesh, tuple(dim == 0 for dim in boxes.placements), boxes.order)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, in the same memory. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
