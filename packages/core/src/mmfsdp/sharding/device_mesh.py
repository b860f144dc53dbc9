"""Makes the DeviceMesh that a plan needs from groups, meshes and device types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmfsdp.basics.torch_releases import KEEPS_ROOT_MESH, torch_has
from mmfsdp.collective.scopes import count_groups_alike, is_group_pair, spanned_rows
from mmfsdp.config import ShardingConfig
from mmfsdp.errors import MeshError
from mmfsdp.planning.mesh import (
    EXPERT_AXES,
    MODEL_AXES,
    axes_spec,
    check_names,
    mesh_spec,
    named_axes,
    without_experts,
    without_stages,
)
from mmfsdp.planning.plan_records import MeshSpec

__all__ = ["build_expert_mesh", "build_mesh", "check_groups", "check_mesh", "mesh_from_groups", "own_part", "shape_of"]

_NAMES = ("replicate", "shard")


def check_groups(given: Any) -> None:
    """Check that ``given`` describes a mesh, and that a pair of groups can span one. Not collective.

    Raises:
        MeshError: It is not a DeviceMesh, a group, a pair of groups or None; or the two groups of a pair do not have
            exactly this rank in common.
    """
    given, _ = without_experts(given)
    if not (given is None or isinstance(given, (DeviceMesh, dist.ProcessGroup, Mapping)) or is_group_pair(given)):
        raise MeshError(
            "mesh must be a DeviceMesh, a pair of them (the second for experts), named axes such as {'replicate': 2, "
            "'shard': 4}, a process group, a (replicate, shard) pair of process groups, or None for all ranks, got "
            f"{given!r} (type {type(given).__name__}). Leave it out; to shard in groups of n ranks, set "
            "sharding.strategy to 'HYBRID_SHARD' and sharding.shard_size to n."
        )
    if is_group_pair(given):
        members = [dist.get_process_group_ranks(group) for group in given]
        if {*members[0]} & {*members[1]} != {dist.get_rank()}:
            raise MeshError(
                f"The groups of a (replicate, shard) pair have exactly one rank in common, but rank {dist.get_rank()} "
                f"was given the ranks {members[0]} and {members[1]}."
            )


def own_part(given: Any) -> Any:
    """Return a mesh without the dimensions of a pipeline, and anything else as it is. Not collective.

    Raises:
        MeshError: See `named_axes`; or this torch cannot shard over such a part beside an axis for model parallelism.
    """
    own = without_stages(given)
    (whole, experts), (first, _) = without_experts(own), without_experts(given)
    divides = {*MODEL_AXES} & {*named_axes(whole).values()} if isinstance(whole, DeviceMesh) else set()
    if whole is not first and (divides or experts is not None) and not torch_has(KEEPS_ROOT_MESH):
        raise MeshError(
            f"torch {torch.__version__} cannot shard a model that is divided along {[*divides, 'expert'][0]!r} over "
            f"the mesh {tuple(first.mesh_dim_names)}, which has stages, too. Install torch "
            f"{'.'.join(map(str, KEEPS_ROOT_MESH))} or newer."
        )
    return own


def check_mesh(spec: MeshSpec, given: Any = None) -> None:
    """Check that a mesh, or the world, has the shape of a plan. Not collective.

    Args:
        spec: The plan's shape.
        given: A DeviceMesh, a process group, a (replicate, shard) pair of groups, or None for the whole world.

    Raises:
        MeshError: The mesh has another shape, or a dimension for tensor or pipeline parallelism.
    """
    pair, (given, experts) = given, without_experts(given)
    if experts is not None:
        config = ShardingConfig(strategy="HYBRID_SHARD" if spec.replicate > 1 else "FULL_SHARD")
        if (found := mesh_spec(pair, config)) != spec:
            raise MeshError(f"The plan is for {spec}, but the given meshes are {found}.")
    elif spec.expert > 1 and not (given is None or isinstance(given, Mapping)):
        raise MeshError(
            f"The plan is for {spec}, but no mesh of experts is given. Give two meshes: (mesh, experts), the second "
            "with the dimensions 'efsdp' and 'expert', over which you divided them."
        )
    if given is None or isinstance(given, Mapping):
        if dist.get_world_size() != spec.world_size:
            raise MeshError(
                f"The plan is for {spec}, but the world has {dist.get_world_size()} ranks. Start as many, or plan for "
                "the running world: mesh=None, or named axes of which one is -1."
            )
        return
    if isinstance(given, DeviceMesh):
        check_names(given.mesh_dim_names or ())
        if (axes := axes_spec(given)) is not None:
            found = axes.model_copy(update={"expert": spec.expert})
            if found != spec:
                raise MeshError(f"The plan is for {spec}, but the given mesh is {found}.")
            return
    if missing := [axis for axis in ("context", "tensor") if spec.axes[axis] > 1]:
        raise MeshError(
            f"The plan is for {spec}, but the given mesh has no axis {missing[0]!r}. Give the mesh that has it."
        )
    shape, planned = tuple(_shape(given)), tuple(spec.dimensions.values())
    # One dimension can be divided; two keep their meaning, unless nothing is sharded.
    divisible = len(shape) == 1 or spec.shard == 1 or shape == (1, *planned)
    if math.prod(shape) != spec.world_size or not (shape == planned or divisible):
        swapped = " Its dimensions are swapped: first comes replicate, then shard." * (shape == planned[::-1])
        raise MeshError(f"The plan is for {spec}, but the given mesh is {' x '.join(map(str, shape))}.{swapped}")


def build_mesh(spec: MeshSpec, device_type: str, given: Any = None) -> DeviceMesh:
    """Return the DeviceMesh for a plan. Collective: every rank of ``given``, and no other; None is the whole world.

    Args:
        spec: The plan's shape; see `check_mesh`.
        device_type: ``'cpu'``, ``'cuda'`` or another that torch knows.
        given: A DeviceMesh, a process group, a (replicate, shard) pair of groups, or None for the whole world.

    Returns:
        A mesh with dimensions ``('shard',)``, or ``('replicate', 'shard')`` if anything is replicated; or the given
        one, if it has further axes.
    """
    given, _ = without_experts(given)
    if isinstance(given, Mapping):
        given = None
    if isinstance(given, DeviceMesh) and axes_spec(given) is not None:
        return given
    if isinstance(given, dist.ProcessGroup) or is_group_pair(given):
        given = mesh_from_groups(given, device_type)
    names, shape = tuple(spec.dimensions), tuple(spec.dimensions.values())
    if given is None:
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    mesh: DeviceMesh = given
    if tuple(mesh.mesh.shape) == shape and mesh.mesh_dim_names == names:
        return mesh
    return _regrouped(mesh, mesh.mesh.reshape(shape), names)


def build_expert_mesh(spec: MeshSpec, device_type: str) -> DeviceMesh | None:
    """Return the mesh that divides experts over the world, or None if a plan has none. Collective: every rank.

    Args:
        spec: The plan's shape.
        device_type: See `build_mesh`.
    """
    if spec.expert == 1:
        return None
    sizes = spec.sizes((("expert", 0),))
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=EXPERT_AXES)


def mesh_from_groups(given: Any, device_type: str) -> DeviceMesh:
    """Return the mesh that one process group, or a (replicate, shard) pair of groups, spans. Collective: its ranks.

    Args:
        given: A ``ProcessGroup``, or a pair of them: first the ranks that hold the same shard, then those that
            shard together, as the dimensions of a DeviceMesh for hybrid sharding.
        device_type: Device type of the mesh.
    """
    if isinstance(given, dist.ProcessGroup):
        return DeviceMesh.from_group(given, device_type, mesh_dim_names=("shard",))
    replicate, shard = given
    ranks = torch.tensor(spanned_rows(replicate, shard))
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=_NAMES)


def shape_of(given: Any) -> Any:
    """Return groups as their (replicate, shard) numbers of ranks, which `plan` accepts, and all else unchanged."""
    if isinstance(given, dist.ProcessGroup):
        return (dist.get_world_size(given),)
    if is_group_pair(given):
        replicate, shard = given
        return dist.get_world_size(replicate), dist.get_world_size(shard)
    return given


def _shape(given: Any) -> tuple[int, ...]:
    found = shape_of(given)
    return tuple(found.mesh.shape) if isinstance(found, DeviceMesh) else found


def _regrouped(mesh: DeviceMesh, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of the same ranks in other dimensions. Collective: every rank of ``mesh``, and no other.

    ``DeviceMesh(...)`` makes its groups with every rank of the world, which hangs if only a part of the world shards,
    or if another part makes groups at the same time. So existing groups are kept, and each missing group is made by
    its own ranks alone.
    """
    existing = {tuple(sorted(dist.get_process_group_ranks(group))): group for group in mesh.get_all_groups()}
    lines = [tuple(sorted(line)) for line in _lines_of(dist.get_rank(), ranks)]
    missing = [line for line in lines if line not in existing]
    if missing and ranks.numel() == dist.get_world_size():
        return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)
    if missing:
        _check_groups_can_be_made()
        count_groups_alike(mesh.get_all_groups())
    groups = [existing[line] if line in existing else _new_group(line) for line in lines]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _lines_of(rank: int, ranks: torch.Tensor) -> list[list[int]]:
    """Return, for each dimension of a mesh, the ranks that differ from ``rank`` only in that dimension."""
    coordinates = (ranks == rank).nonzero()[0].tolist()
    lines = []
    for dim in range(ranks.ndim):
        index = [slice(None) if other == dim else at for other, at in enumerate(coordinates)]
        lines.append(ranks[tuple(index)].tolist())
    return lines


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return made


def _check_groups_can_be_made() -> None:
    """Raise if making a group on its own ranks alone would hang."""
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        raise MeshError(
            "The mesh is a part of the world and has to be divided, but the process group is bound to a device "
            "(init_process_group(device_id=...)), so that all ranks of the world must make each group. Make the "
            "(replicate, shard) mesh together with the whole world's, for example init_device_mesh(..., "
            'mesh_dim_names=("pp", "replicate", "shard"))["replicate", "shard"], and give that.'
        )
