"""Determines the shape of the mesh from a given mesh and the sharding strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mmfsdp.config import ShardingConfig
from mmfsdp.errors import MeshError
from mmfsdp.planning.plan_records import MeshSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MeshLike", "check_names", "mesh_spec"]

MeshLike: TypeAlias = "int | Sequence[int] | MeshSpec | DeviceMesh | None"
"""A world size, a (replicate, shard) pair, a `MeshSpec`, a DeviceMesh, or None for the running world."""

_MODEL_PARALLEL = {"tp", "tensor", "etp", "mp", "model", "ep", "expert", "experts", "pp", "pipe", "pipeline"}
"""Parts of names of mesh dimensions along which ranks hold different parts of the model, not of the batch."""


def mesh_spec(mesh: Any, sharding: ShardingConfig) -> MeshSpec:
    """Return the shape of the mesh that a strategy needs. Not collective; pure unless ``mesh`` is None.

    Args:
        mesh: A world size (ranks), a (replicate, shard) pair of ranks, a `MeshSpec`, a ``DeviceMesh`` of one or two
            dimensions, or None: the running process group, or a single rank if there is none.
        sharding: The strategy and, for hybrid ones, the ranks of a shard group.

    Raises:
        MeshError: The shape does not fit the strategy or the shard size.
    """
    strategy, live = sharding.strategy, mesh is None
    shape = _shape(mesh)
    world_size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    if strategy == "NO_SHARD":
        return MeshSpec(replicate=world_size, shard=1)
    if "HYBRID" not in strategy:
        if len(shape) == 2 and shape[0] > 1:
            raise MeshError(
                f"Strategy {strategy!r} shards over one mesh dimension, but the mesh is {shape[0]} x {shape[1]}. "
                "Use 'HYBRID_SHARD' (or '_HYBRID_SHARD_ZERO2') for a (replicate, shard) mesh, or give a 1-D mesh. If "
                "a dimension is for tensor parallelism, leave it out: name the dimensions, and give mesh['shard'].",
                config="sharding.strategy",
            )
        return MeshSpec(shard=world_size)
    if len(shape) == 2:
        spec = MeshSpec(replicate=shape[0], shard=shape[1])
        if sharding.shard_size not in (None, spec.shard):
            swapped = sharding.shard_size == spec.replicate
            raise MeshError(
                f"sharding.shard_size={sharding.shard_size} contradicts the mesh, whose shard dimension has "
                f"{spec.shard} ranks. "
                + (
                    f"The pair is swapped: give (replicate, shard) = ({spec.shard}, {spec.replicate})."
                    if swapped
                    else "Remove one of the two."
                ),
                config="sharding.shard_size",
            )
    else:
        spec = _split(world_size, sharding.shard_size or (_node_size() if live else None), strategy)
    if spec.shard == 1 and spec.world_size > 1:
        raise MeshError(
            f"Strategy {strategy!r} with a shard group of one rank shards nothing (FSDP1 would not even average "
            "gradients). Use 'NO_SHARD' to replicate, or a shard group of at least 2 ranks.",
            config="sharding.shard_size",
        )
    return spec


def _split(world_size: int, shard_size: int | None, strategy: str) -> MeshSpec:
    if shard_size is None:
        raise MeshError(
            f"Strategy {strategy!r} needs the number of ranks that shard together. Set sharding.shard_size "
            "(usually the devices of one node), or give the mesh as a (replicate, shard) pair.",
            config="sharding.shard_size",
        )
    if world_size % shard_size:
        raise MeshError(
            f"A world of {world_size} ranks cannot be divided into shard groups of {shard_size}. "
            f"Divisors of {world_size}: {[n for n in range(2, world_size + 1) if world_size % n == 0]}.",
            config="sharding.shard_size",
        )
    return MeshSpec(replicate=world_size // shard_size, shard=shard_size)


def _node_size() -> int | None:
    """Return the number of ranks on this node that torchrun states."""
    size = os.environ.get("LOCAL_WORLD_SIZE")
    return int(size) if size and size.isdigit() else None


def _shape(mesh: Any) -> tuple[int, ...]:
    if mesh is None:
        import torch.distributed as dist

        running = dist.is_available() and dist.is_initialized()
        return (dist.get_world_size() if running else 1,)
    if isinstance(mesh, MeshSpec):
        return (mesh.replicate, mesh.shard) if mesh.replicate > 1 else (mesh.shard,)
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        shape: tuple[int, ...] = (mesh,)
    elif isinstance(mesh, Sequence) and not isinstance(mesh, str):
        shape = tuple(mesh)
    elif hasattr(mesh, "mesh") and hasattr(mesh, "ndim"):
        shape = tuple(mesh.mesh.shape)
    else:
        raise MeshError(f"A mesh must be a world size, a (replicate, shard) pair or a DeviceMesh, got {mesh!r}.")
    check_names(getattr(mesh, "mesh_dim_names", None) or ())
    if len(shape) not in (1, 2) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise MeshError(
            f"A mesh must have one dimension (shard) or two (replicate, shard) of at least one rank each, got {shape}."
        )
    return shape


def check_names(names: Sequence[str]) -> None:
    """Check that no dimension of a mesh is named after tensor or pipeline parallelism; a single dimension may be.

    Args:
        names: The names of the dimensions; none for a mesh without names.

    Raises:
        MeshError: One of several dimensions has such a name.
    """
    other = [name for name in names if _MODEL_PARALLEL & {*name.lower().split("_")}]
    ours = [name for name in names if name not in other]
    if other and ours:
        index = ", ".join(f'"{name}"' for name in ours)
        raise MeshError(
            f"Dimension {other[0]!r} of the mesh {tuple(names)} is not for data parallelism, and mmfsdp shards over "
            f"ranks that get different batches. Give mesh[{index}]. It can shard the modules that tensor or pipeline "
            "parallelism leaves whole; docs/howto/frameworks.md has an example."
        )
