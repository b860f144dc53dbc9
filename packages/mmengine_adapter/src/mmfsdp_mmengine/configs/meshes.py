"""Builds the process groups and the device mesh that a config describes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from mmengine.device import get_device
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmfsdp.errors import ConfigError, MeshError
from mmfsdp_mmengine.configs.named_functions import build_function
from mmfsdp_mmengine.configs.unknown import refuse_unknown

__all__ = ["build_group", "build_mesh"]


def build_group(given: Any) -> Any:
    """Return the group, or groups, of a config. Collective if there is a dict: every rank of the world.

    Args:
        given: A dict of arguments of ``torch.distributed.new_group``, or of the function that ``type`` names; a
            sequence of such; anything else is returned as it is. Not changed.

    Raises:
        MeshError: A single dict names ranks, but not all.
    """
    ranks = given.get("ranks") if isinstance(given, Mapping) else None
    missing = [] if ranks is None else [rank for rank in range(dist.get_world_size()) if rank not in ranks]
    if missing:
        raise MeshError(
            f"process_group leaves out the ranks {missing}, which were started too. Remove process_group; to "
            "shard in groups of n ranks, write sharding_strategy='HYBRID_SHARD' and "
            "device_mesh=dict(mesh_shape=(replicas, n)).",
            config="process_group.ranks",
        )
    if isinstance(given, list | tuple):
        return tuple(_group(item) for item in given)
    return _group(given)


def _group(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    function = build_function({"type": dist.new_group, **given}, "process_group")
    return None if function is None else function()


def build_mesh(given: Mapping[str, Any]) -> DeviceMesh:
    """Return the mesh of a config. Collective: every rank of the world.

    Args:
        given: Arguments of ``torch.distributed.init_device_mesh``. ``device_type`` is by default the device that
            MMEngine trains on. Not changed.

    Raises:
        ConfigError: An argument is unknown or has a value that is not accepted.
        MeshError: The mesh has more or fewer ranks than the world.
    """
    known = [*inspect.signature(init_device_mesh).parameters]
    refuse_unknown("device_mesh", given, known, "device_mesh")
    shape, names = given.get("mesh_shape"), given.get("mesh_dim_names")
    if not isinstance(shape, list | tuple) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ConfigError(
            f"device_mesh.mesh_shape must be a tuple of numbers of ranks, such as (2, 8), got {shape!r}.",
            config="device_mesh.mesh_shape",
        )
    if names is not None and len(names) != len(shape):
        raise ConfigError(
            f"device_mesh.mesh_dim_names must name the {len(shape)} dimensions of mesh_shape {tuple(shape)}, got "
            f"{names!r}.",
            config="device_mesh.mesh_dim_names",
        )
    ranks = dist.get_world_size()
    if math.prod(shape) != ranks:
        raise MeshError(
            f"device_mesh.mesh_shape {tuple(shape)} is for {math.prod(shape)} ranks, but {ranks} were started. "
            f"Start as many, or write a shape for {ranks}: ({ranks},), or (replicas, shards) for HYBRID_SHARD.",
            config="device_mesh.mesh_shape",
        )
    return init_device_mesh(**{"device_type": get_device(), **given, "mesh_shape": tuple(shape)})
