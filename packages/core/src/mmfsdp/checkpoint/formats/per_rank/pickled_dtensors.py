"""Reads where a pickled DTensor lies: the box of the whole tensor that the rank which wrote it holds.

A DTensor is pickled as its local tensor and a description: the shape of the whole, the placements, and the device mesh
with this rank's coordinates in it (torch/distributed/tensor/_dtensor_spec.py, placement_types.py, device_mesh.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds, EvenBoxes, division_order
from mmfsdp.checkpoint.chunks import row_major_strides
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledDTensor
from mmfsdp.checkpoint.pickles.unpickling import PickledObject, fields, integers
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = ["HeldShard", "Mesh", "boxes_of", "shard_of"]

_MOST_RANKS = 1_000_000  # more is damage, or malice


Mesh = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The number of ranks per dimension of a mesh, the coordinates of this rank, and the ranks in row-major order."""


@dataclass(frozen=True, slots=True)
class HeldShard:
    """The part of a tensor that a rank holds."""

    box: Bounds
    """The part that this rank holds."""
    ranks: tuple[int, ...]
    """The ranks of the mesh, in row-major order."""
    rank: int
    """The rank that wrote it."""


def shard_of(tensor: PickledDTensor, meshes: dict[Any, Mesh]) -> HeldShard:
    """Return the part of a tensor that a rank holds.

    Args:
        tensor: What the rank's file holds.
        meshes: The meshes of this file that were read before, by the objects that describe them; added to.

    Raises:
        FormatError: It holds partial sums, or is divided in a way that is not known here.
        CorruptCheckpointError: Its description is malformed, or does not fit its local tensor.
    """
    path = tensor.local.record.file
    try:
        shard = _shard_of(tensor, meshes)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path.name} holds a DTensor whose description is malformed: {type(error).__name__}: {error}.",
            file=str(path),
        ) from error
    if tensor.local.shape != shard.box[1]:
        raise CorruptCheckpointError(
            f"{path.name} holds {list(tensor.local.shape)} elements of a tensor of shape {list(tensor.shape)} "
            f"(expected {list(shard.box[1])} on rank {shard.rank}).",
            file=str(path),
            offset=tensor.local.offset,
        )
    return shard


def boxes_of(tensor: PickledDTensor, meshes: dict[Any, Mesh]) -> tuple[EvenBoxes, tuple[int, ...]]:
    """Return the boxes of a tensor that `shard_of` has accepted, and the ranks that the boxes refer to by index."""
    sizes, _, ranks = meshes[tensor.spec["mesh"]]
    return _even_boxes(tensor, sizes), ranks


def _shard_of(tensor: PickledDTensor, meshes: dict[Any, Mesh]) -> HeldShard:
    spec = tensor.spec
    if (mesh := meshes.get(spec["mesh"])) is None:
        mesh = meshes[spec["mesh"]] = _mesh_of(fields(spec["mesh"]))
    sizes, coordinates, ranks = mesh
    at = sum(coordinate * stride for coordinate, stride in zip(coordinates, row_major_strides(sizes), strict=True))
    return HeldShard(_even_boxes(tensor, sizes).held_by(at), ranks, ranks[at])


def _mesh_of(mesh: dict[str, Any]) -> Mesh:
    coordinates = integers(mesh["_coordinate_on_dim"])
    if (tensor := mesh.get("mesh")) is not None:  # up to torch 2.9
        sizes, ranks = integers(tensor.shape), _ranks(mesh["_flatten_mesh_list"])
    else:
        # Steps through the ranks of the world; a dimension that was made of several has one for each.
        steps = _steps(fields(mesh["_layout"]))
        sizes = tuple(math.prod(size for size, _ in step) for step in steps)
        if 0 in sizes or math.prod(sizes) > _MOST_RANKS:
            raise ValueError(f"a device mesh has none, or more than {_MOST_RANKS} ranks")
        world = _ranks(mesh["_flatten_rank_map"])
        offsets = [_offsets(step) for step in steps]
        first = _index_in_world(mesh, world) - sum(each[at] for each, at in zip(offsets, coordinates, strict=True))
        indices = [first + sum(step) for step in itertools.product(*offsets)]
        if not all(0 <= index < len(world) for index in indices):
            raise ValueError("a device mesh has ranks that its world lacks")
        ranks = tuple(world[index] for index in indices)
    inside = all(coordinate < size for coordinate, size in zip(coordinates, sizes, strict=True))
    if not inside or math.prod(sizes) != len(ranks):
        raise ValueError("a device mesh has another number of ranks than its shape says")
    return sizes, coordinates, ranks


def _index_in_world(mesh: dict[str, Any], world: tuple[int, ...]) -> int:
    """Return the index of the rank that wrote the mesh among the ranks of the world that it lists."""
    if "_rank" in mesh:
        return world.index(mesh["_rank"])
    # torch 2.10 does not name the rank. The mesh that this one is a part of has every rank of the world.
    root = fields(mesh["_root_mesh"]) if mesh["_root_mesh"] is not None else mesh
    coordinates = integers(root["_coordinate_on_dim"])
    return sum(_offsets(step)[at] for step, at in zip(_steps(fields(root["_layout"])), coordinates, strict=True))


def _steps(layout: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Return sizes and strides of each dimension of a mesh (torch/distributed/_mesh_layout.py)."""
    if "axes" in layout:  # since torch 2.13
        axes = [(axis["shape"], axis["stride"]) for axis in map(fields, layout["axes"])]
    elif isinstance(layout["shape"], tuple):
        axes = [*zip(layout["shape"], layout["stride"], strict=True)]
    else:
        axes = [(layout["shape"], layout["stride"])]
    return [[*zip(_flat(sizes), _flat(strides), strict=True)] for sizes, strides in axes]


def _flat(sizes: Any) -> tuple[int, ...]:
    if isinstance(sizes, tuple | list):
        return tuple(size for part in sizes for size in _flat(part))
    return integers((sizes,))


def _offsets(step: list[tuple[int, int]]) -> list[int]:
    """Return how far each coordinate along a dimension is from the first one, in ranks of the world."""
    parts = itertools.product(*([index * stride for index in range(size)] for size, stride in step))
    return [sum(part) for part in parts]


def _ranks(given: Any) -> tuple[int, ...]:
    if not isinstance(given, tuple | list) or not all(type(rank) is int and rank >= 0 for rank in given):
        raise ValueError("a device mesh does not list its ranks")
    return tuple(given)


def _even_boxes(tensor: PickledDTensor, sizes: tuple[int, ...]) -> EvenBoxes:
    """Return the boxes of a tensor that the ranks of its mesh hold."""
    path, dims = tensor.local.record.file, len(tensor.shape)
    placements: list[int | None] = []
    factors: list[Any] = []
    strided = False
    for mesh_dim in range(len(sizes)):
        placement = tensor.spec["placements"][mesh_dim]
        kind = placement.qualname if isinstance(placement, PickledObject) else ""
        if kind not in ("Replicate", "Shard", "_StridedShard"):
            raise FormatError(
                f"{path.name} holds a DTensor placed as {kind or repr(placement)}, such as sums that the ranks have "
                "still to add up. Save its full_tensor() instead.",
                file=str(path),
            )
        given = fields(placement) if kind != "Replicate" else {}
        [of] = integers((given["dim"],)) if given else [None]
        if of is not None and of >= dims:
            raise ValueError(f"dimension {of} of a tensor of {dims} dimensions is sharded")
        placements.append(of)
        factors.append(given["split_factor"] if kind == "_StridedShard" else 1)
        strided |= kind == "_StridedShard"
    try:
        order = division_order(placements, factors, sizes)
    except ValueError as error:
        raise FormatError(
            f"{path.name} holds a DTensor with a _StridedShard of {error}. Save its full_tensor() instead.",
            file=str(path),
        ) from None
    if not strided:
        _check_order(tensor.spec.get("shard_order"), placements, path)
    return EvenBoxes(tensor.shape, sizes, tuple(placements), 0, order)


def _check_order(given: Any, placements: Sequence[int | None], path: Path) -> None:
    """Raise if a newer release states another order than from the first dimension of the mesh to the last."""
    for entry in given or ():
        of, dims = entry.args if isinstance(entry, PickledObject) else entry
        if [mesh_dim for mesh_dim, other in enumerate(placements) if other == of] != [*dims]:
            raise FormatError(
                f"{path.name} holds a DTensor whose dimension {of} the dimensions {list(dims)} of its mesh divide in "
                "this order, which is not supported yet. Save its full_tensor() instead.",
                file=str(path),
            )
