"""From groups, meshes and device settings to the DeviceMesh that a plan needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmfsdp.collective import is_group_pair
from mmfsdp.errors import MeshError
from mmfsdp.planning.schema import MeshSpec

__all__ = ["build_mesh", "device_of", "mesh_from_groups", "pick_device_type", "shape_of"]


def pick_device_type(wanted: str) -> str:
    """Return ``'cuda'`` or ``'cpu'``: what was asked for, or what is there and the process group can use.

    Raises:
        MeshError: CUDA is asked for and not there.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise MeshError(
            "init.device is 'cuda', but torch sees no CUDA device. Use 'auto' or 'cpu'.", config="init.device"
        )
    if wanted != "auto":
        return wanted
    if not torch.cuda.is_available():
        return "cpu"
    backend = str(dist.get_backend_config()) if dist.is_initialized() else "nccl"
    return "cuda" if "nccl" in backend else "cpu"


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank computes on."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def build_mesh(spec: MeshSpec, device: str, given: Any = None) -> DeviceMesh:
    """Return the DeviceMesh for a plan. Collective: every rank of the world.

    Args:
        spec: The shape that the plan has.
        device: ``'auto'``, ``'cpu'`` or ``'cuda'``.
        given: A DeviceMesh, a process group, a (shard, replicate) pair of groups, or None for the whole world.

    Returns:
        A mesh with dimensions ``('shard',)``, or ``('replicate', 'shard')`` if anything is replicated.

    Raises:
        MeshError: What is given, or the world, does not have the shape of ``spec``.
    """
    device_type = pick_device_type(device)
    if isinstance(given, dist.ProcessGroup) or is_group_pair(given):
        given = mesh_from_groups(given, device_type)
    if isinstance(given, DeviceMesh):
        return _as_planned(given, spec)
    if dist.get_world_size() != spec.world_size:
        raise MeshError(
            f"The plan is for {spec}, but the world has {dist.get_world_size()} ranks. "
            "Plan for the running world (mesh=None), or start that many ranks."
        )
    if spec.replicate == 1:
        return init_device_mesh(device_type, (spec.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (spec.replicate, spec.shard), mesh_dim_names=("replicate", "shard"))


def mesh_from_groups(given: Any, device_type: str) -> DeviceMesh:
    """Return the mesh that one process group, or a (shard, replicate) pair of groups, spans. Collective.

    Args:
        given: A ``ProcessGroup``, or a pair of them: first the ranks that shard together, then those that
            hold the same shard, as torch's FSDP1 takes them for hybrid sharding.
        device_type: Device type of the mesh.
    """
    if isinstance(given, dist.ProcessGroup):
        return DeviceMesh.from_group(given, device_type, mesh_dim_names=("shard",))
    shard, replicate = given
    rows: list[list[int] | None] = [None] * dist.get_world_size(replicate)
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    return DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )


def shape_of(given: Any) -> Any:
    """Return what `plan` can read a mesh's shape from: (replicate, shard) ranks for groups, all else as it is."""
    if isinstance(given, dist.ProcessGroup):
        return (dist.get_world_size(given),)
    if is_group_pair(given):
        shard, replicate = given
        return dist.get_world_size(replicate), dist.get_world_size(shard)
    return given


def _as_planned(mesh: DeviceMesh, spec: MeshSpec) -> DeviceMesh:
    """The given mesh under our dimension names, in the plan's number of dimensions."""
    shape = tuple(mesh.mesh.shape)
    planned = (spec.shard,) if spec.replicate == 1 else (spec.replicate, spec.shard)
    if shape == planned and mesh.mesh_dim_names == ("replicate", "shard")[-len(planned) :]:
        return mesh
    # One dimension can be divided; of two, what they mean is kept, unless nothing is sharded.
    divisible = len(shape) == 1 or spec.shard == 1 or shape == (1, *planned)
    if mesh.mesh.numel() != spec.world_size or not (shape == planned or divisible):
        raise MeshError(f"The plan is for {spec}, but the given mesh is {' x '.join(map(str, shape))}.")
    names = ("shard",) if len(planned) == 1 else ("replicate", "shard")
    if shape == planned:  # the same groups under our names
        groups = mesh.get_all_groups()
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(planned), mesh_dim_names=names)
