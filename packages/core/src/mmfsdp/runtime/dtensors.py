"""Tells which part of a whole tensor a rank holds, and gathers whole tensors."""

from __future__ import annotations

import functools
import itertools
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

__all__ = [
    "Box",
    "batch_mesh",
    "box_of",
    "boxes_of",
    "data_mesh",
    "data_of_experts",
    "is_box",
    "is_part_of",
    "local_part",
    "whole_tensor",
]

_FLAT = "shard_context"
"""The dimension that the axes ``shard`` and ``context`` make together."""


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
        mesh: A mesh of which `is_part_of` is true for the tensor; its other ranks replicate the tensor. Default: the
            tensor's own mesh.

    Returns:
        The boxes by rank of the mesh. Their own mesh has the same ranks in the same order, maybe by other dimensions.

    Raises:
        StateDictError: The tensor has a placement other than ``Shard``, ``Replicate`` and the one of a dimension that
            ``fully_shard`` divides after tensor parallelism did.
    """
    own = tensor.device_mesh
    placements = [None if isinstance(placement, Replicate) else _dim_of(placement) for placement in tensor.placements]
    order = _order_of(tensor, placements)
    if mesh is None or tuple(mesh.shape) == tuple(own.shape):
        return EvenBoxes(tuple(tensor.shape), tuple(own.shape), tuple(placements), 0, order)
    if (lattice := _lattice_of(own, mesh)) is None:
        raise StateDictError(f"{own} is no part of {mesh}, so that its ranks hold no boxes of the tensor.")
    sizes, at = lattice
    lifted: list[int | None] = [None] * len(sizes)
    for index, dim in zip(at, placements, strict=True):
        if index is not None:
            lifted[index] = dim
    # Other dimensions replicate, so that they may come first.
    divides = [known for index in order or range(own.ndim) if (known := at[index]) is not None]
    full = (*(index for index in range(len(sizes)) if index not in divides), *divides)
    return EvenBoxes(tuple(tensor.shape), sizes, tuple(lifted), 0, () if full == tuple(sorted(full)) else full)


def is_box(tensor: DTensor) -> bool:
    """Tell whether each rank of a tensor's mesh holds a box of it. Not collective."""
    try:
        boxes_of(tensor)
    except StateDictError:
        return False
    return True


def is_part_of(tensor: DTensor, mesh: DeviceMesh) -> bool:
    """Tell whether the mesh of a tensor is a mesh, or this rank's part of it, so that `boxes_of` can be asked."""
    own = tensor.device_mesh
    if tuple(own.shape) == tuple(mesh.shape):
        return torch.equal(own.mesh, mesh.mesh)
    return _lattice_of(own, mesh) is not None


def _lattice_of(own: DeviceMesh, mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int | None, ...]] | None:
    return _lattice(tuple(own.mesh.flatten().tolist()), tuple(own.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


@functools.lru_cache(maxsize=64)  # every tensor of a save asks, and there are few meshes
def _lattice(
    ranks: tuple[int, ...], shape: tuple[int, ...], all_ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int | None, ...]] | None:
    """Return a mesh with all ranks, in the same order, that has the dimensions of a part of it.

    The meshes of experts and of all else number the same ranks by other dimensions, so only the ranks count here.

    Args:
        ranks: The ranks of the part, in row-major order.
        shape: Its ranks per dimension.
        all_ranks: The ranks of the whole mesh, in row-major order.

    Returns:
        Its sizes, and for each dimension of the part the dimension that it is, None if it has one rank; or None if the
        part's ranks are not at even distances.
    """
    index = {rank: at for at, rank in enumerate(all_ranks)}
    if not {*ranks} <= index.keys():
        return None
    found = [index[rank] for rank in ranks]
    strides: list[int] = []  # of each dimension of the part, in ranks of the mesh
    inner = len(found)
    for size in shape:
        inner //= size
        strides.append(found[inner] - found[0] if size > 1 else 0)
    sizes: list[int] = []
    at: list[int | None] = [None] * len(shape)
    left = len(index)
    for dim in sorted((dim for dim in range(len(shape)) if strides[dim]), key=lambda dim: -strides[dim]):
        size, stride = shape[dim], strides[dim]
        if stride <= 0 or left % (size * stride) or found[0] // stride % size:
            return None
        sizes += [left // (size * stride)] if left > size * stride else []
        at[dim] = len(sizes)
        sizes.append(size)
        left = stride
    sizes += [left] if left > 1 or not sizes else []
    steps = [range(0, size * stride, stride) if stride else (0,) for size, stride in zip(shape, strides, strict=True)]
    return (tuple(sizes), tuple(at)) if found == [found[0] + sum(step) for step in itertools.product(*steps)] else None


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
    """Return the part of a model's mesh over which parameters are sharded and gradients averaged.

    Not collective, but for the first time that a mesh with an axis ``context`` is met: every rank of it.
    """
    names = mesh.mesh_dim_names or ()
    if len(names) == 1:
        return mesh  # one dimension may have any name
    axes = {axis_of(name): name for name in names}
    if "context" in axes:
        mesh[axes["shard"], axes["context"]]._flatten(_FLAT)  # there is no public way
        first = axes.get("replicate")
        return mesh[_FLAT] if first is None or mesh.shape[0] == 1 else mesh[first, _FLAT]
    return _without(mesh, MODEL_AXES)


def data_of_experts(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh of experts over which they are sharded and averaged. Not collective."""
    return _without(mesh, ("expert",))


def batch_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a model's mesh whose ranks get different batches: `mesh` itself if all do. Not collective."""
    return _without(mesh, ("context", *MODEL_AXES))


def _without(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    axes = (*axes, *(["replicate"] if mesh.shape[0] == 1 else []))  # one replica needs no reduction over replicas
    left = tuple(name for name in names if axis_of(name) not in axes)
    return mesh if len(names) == 1 or len(left) == len(names) else mesh[left]


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
