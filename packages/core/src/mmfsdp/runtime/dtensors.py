"""Tells which part of a whole tensor a rank holds, and gathers whole tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # read here only: what fully_shard makes of `tensor`

from mmfsdp.basics.boxes import Bounds, EvenBoxes, division_order
from mmfsdp.collective.scopes import rank_in
from mmfsdp.errors import StateDictError
from mmfsdp.planning.mesh import MODEL_AXES, axis_of

__all__ = ["Box", "box_of", "boxes_of", "data_mesh", "is_box", "is_part_of", "local_part", "whole_tensor"]


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
        StateDictError: The tensor is not placed by ``Shard`` and ``Replicate``; see `boxes_of`.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    if tensor.device_mesh.get_coordinate() is None:
        raise StateDictError(
            f"This rank is not in the mesh of a tensor of shape {tuple(tensor.shape)}: {tensor.device_mesh}."
        )
    return Box(*boxes_of(tensor).held_by(rank_in(tensor.device_mesh)))


def boxes_of(tensor: DTensor, mesh: DeviceMesh | None = None) -> EvenBoxes:
    """Return the boxes of a tensor that the ranks of a mesh hold. Not collective.

    Args:
        tensor: The tensor.
        mesh: A mesh of which `is_part_of` is true for the tensor; it replicates the tensor along its other dimensions.
            Default: the tensor's own mesh.

    Raises:
        StateDictError: The tensor has a placement other than ``Shard``, ``Replicate`` and the one of a dimension that
            ``fully_shard`` divides after tensor parallelism did.
    """
    own = tensor.device_mesh
    placements = [None if isinstance(placement, Replicate) else _dim_of(placement) for placement in tensor.placements]
    order = _order_of(tensor, placements)
    if mesh is None or mesh.ndim == own.ndim:
        return EvenBoxes(tuple(tensor.shape), tuple(own.shape), tuple(placements), 0, order)
    names = [*(mesh.mesh_dim_names or ())]
    at = [names.index(name) for name in own.mesh_dim_names or ()]
    lifted: list[int | None] = [None] * mesh.ndim
    for index, dim in zip(at, placements, strict=True):
        lifted[index] = dim
    rest = [index for index in range(mesh.ndim) if index not in at]
    # Where the tensor's own mesh has an order, other dimensions come first: they replicate.
    lifted_order = (*rest, *(at[index] for index in order)) if order else ()
    return EvenBoxes(tuple(tensor.shape), tuple(mesh.shape), tuple(lifted), 0, lifted_order)


def is_box(tensor: DTensor) -> bool:
    """Tell whether each rank of a tensor's mesh holds a box of it. Not collective."""
    try:
        boxes_of(tensor)
    except StateDictError:
        return False
    return True


def is_part_of(tensor: DTensor, mesh: DeviceMesh) -> bool:
    """Tell whether the mesh of a tensor is a mesh, or this rank's part of it, so that `boxes_of` can be asked."""
    own, here = tensor.device_mesh, mesh.get_coordinate()
    if tuple(own.shape) == tuple(mesh.shape):
        return torch.equal(own.mesh, mesh.mesh)
    names, inner = mesh.mesh_dim_names or (), own.mesh_dim_names or ()
    if here is None or not inner or inner != tuple(name for name in names if name in inner):
        return False
    part = mesh.mesh[tuple(slice(None) if name in inner else at for name, at in zip(names, here, strict=True))]
    return torch.equal(part, own.mesh)


def _dim_of(placement: Placement) -> int:
    if type(placement) in (Shard, _StridedShard):
        return placement.dim  # type: ignore[attr-defined, no-any-return]
    raise StateDictError(f"A rank holds no box of a tensor placed as {placement}; use Shard or Replicate.")


def _order_of(tensor: DTensor, placements: Sequence[int | None]) -> tuple[int, ...]:
    """Return the order in which the dimensions of a tensor's mesh divide it: see `division_order`."""
    factors = [placement.split_factor if type(placement) is _StridedShard else 1 for placement in tensor.placements]
    try:
        return division_order(placements, factors, tuple(tensor.device_mesh.shape))
    except ValueError as error:
        raise StateDictError(
            f"A rank holds no box of a tensor placed as {tensor.placements}: it has {error}."
        ) from None


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a model's mesh whose ranks get different batches: `mesh` itself if all do. Not collective."""
    names = mesh.mesh_dim_names or ()
    data = tuple(name for name in names if axis_of(name) not in MODEL_AXES)
    return mesh if len(names) == 1 or len(data) == len(names) else mesh[data]  # one dimension may have any name


def local_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the view of ``whole`` that this rank holds of a tensor placed as ``like``. Not collective."""
    return whole[box_of(like).slices]


def whole_tensor(tensor: torch.Tensor, *, cpu_offload: bool = False) -> torch.Tensor:
    """Return the whole tensor in memory of its own. Collective for a DTensor: every rank of its mesh."""
    value = tensor.detach()
    held = value.to_local() if isinstance(value, DTensor) else value
    gathered = _gather(value) if isinstance(value, DTensor) else value
    if cpu_offload and gathered.device.type != "cpu":
        return gathered.cpu()
    # If nothing had to be gathered, the result is the model's own memory.
    shared = gathered.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    return gathered.clone() if shared else gathered


def _gather(tensor: DTensor) -> torch.Tensor:
    """Return ``tensor.full_tensor()`` without torch's advice against two gathers in turn: two axes need them."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addFilter(_is_other_advice)
    try:
        return tensor.full_tensor()
    finally:
        logger.removeFilter(_is_other_advice)


def _is_other_advice(record: logging.LogRecord) -> bool:
    return "sequential" not in record.getMessage()
