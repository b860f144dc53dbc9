"""Determines the shape of the mesh from a given mesh and the sharding strategy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mmfsdp.config import ShardingConfig
from mmfsdp.errors import MeshError, closest
from mmfsdp.planning.plan_records import AXES, MeshSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "EXPERT_AXES",
    "MODEL_AXES",
    "MeshLike",
    "axes_spec",
    "axis_of",
    "check_names",
    "mesh_spec",
    "named_axes",
    "without_experts",
    "without_stages",
]

MeshLike: TypeAlias = (
    "int | Sequence[int] | Mapping[str, int] | MeshSpec | DeviceMesh | tuple[DeviceMesh, DeviceMesh] | None"
)
"""A world size, a (replicate, shard) pair, the size of each named axis, a `MeshSpec`, a DeviceMesh, a pair of these: of
all parameters but experts, and of experts; or None for the running world."""

MODEL_AXES = ("tensor",)
"""The axes whose ranks share a batch and hold different parts of the model."""

EXPERT_AXES = ("replicate", "efsdp", "expert")
"""The dimensions of the mesh of experts; the first may be missing."""

_DIVISIONS = (*AXES, "expert")
_SPELLINGS = {
    **{axis: axis for axis in _DIVISIONS},
    **{"dp_replicate": "replicate", "dp_shard": "shard", "fsdp": "shard", "dp": "shard"},
    **{"cp": "context", "tp": "tensor", "ep": "expert"},
}
"""Names that other libraries give to the dimensions of a mesh, and the axis that each is."""

_STAGES = {"pp", "pipe", "pipeline"}
_MODEL_PARALLEL = {"tp", "tensor", "etp", "mp", "model", "ep", "expert", "experts", *_STAGES}
"""Parts of names of mesh dimensions along which ranks hold different parts of the model, not of the batch."""


def mesh_spec(mesh: Any, sharding: ShardingConfig) -> MeshSpec:
    """Return the shape of the mesh that a strategy needs. Not collective; pure unless ``mesh`` is None.

    Args:
        mesh: A world size (ranks), a (replicate, shard) pair of ranks, the size of each named axis, of which one may
            be -1 in a running world, a `MeshSpec`, a ``DeviceMesh``, a pair of these: the second divides experts; or
            None: the running process group, or a single rank if there is none.
        sharding: The strategy and, for hybrid ones, the ranks of a shard group.

    Raises:
        MeshError: The shape does not fit the strategy or the shard size.
    """
    mesh, experts = without_experts(mesh)
    if experts is not None:
        return _with_experts(mesh_spec(mesh, sharding), mesh, experts)
    strategy, live = sharding.strategy, mesh is None
    if (axes := _axes(mesh)) is not None:
        if strategy == "NO_SHARD" and axes.shard > 1:
            raise MeshError(
                f"Strategy 'NO_SHARD' replicates, but the axis 'shard' of the mesh has {axes.shard} ranks. Give them "
                "to the axis 'replicate', and one rank to 'shard'; or use 'FULL_SHARD'.",
                config="sharding.strategy",
            )
        if sharding.shard_size not in (None, axes.shard):
            raise MeshError(
                f"sharding.shard_size={sharding.shard_size} contradicts the mesh, whose axis 'shard' has {axes.shard} "
                "ranks. Remove one of the two.",
                config="sharding.shard_size",
            )
        return axes  # the axis 'replicate' says what a hybrid strategy would
    shape = _shape(mesh)
    world_size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    if strategy == "NO_SHARD":
        return MeshSpec(replicate=world_size, shard=1)
    if "HYBRID" not in strategy:
        if len(shape) == 2 and shape[0] > 1:
            names = getattr(mesh, "mesh_dim_names", None) or ()
            if isinstance(mesh, MeshSpec) or [axis_of(name) for name in names] == ["replicate", "shard"]:
                return MeshSpec(replicate=shape[0], shard=shape[1])  # named: says what a hybrid strategy would
            hybrid = "HYBRID_SHARD" if strategy == "FULL_SHARD" else "_HYBRID_SHARD_ZERO2"
            raise MeshError(
                f"Strategy {strategy!r} shards over one mesh dimension, but the mesh is {shape[0]} x {shape[1]}"
                f"{f', named {tuple(names)}' if names else ''}. Name the dimensions 'replicate' and 'shard', or use "
                f"{hybrid!r} for a (replicate, shard) mesh, or give a 1-D mesh. A dimension for tensor parallelism is "
                "named 'tensor'.",
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


def axis_of(name: str) -> str | None:
    """Return the axis that the name of a mesh dimension stands for, or None if it names none."""
    return _SPELLINGS.get(name)


def named_axes(mesh: DeviceMesh) -> dict[str, str]:
    """Return the dimensions of a mesh that are axes: their names, in order, each with the axis.

    Raises:
        MeshError: Two dimensions are one axis, or the axes are in another order than that of `AXES`.
    """
    found = {name: axis for name in mesh.mesh_dim_names or () if (axis := axis_of(name)) is not None}
    axes = [*found.values()]
    if "expert" in axes and len(axes) > 1 and "efsdp" not in (mesh.mesh_dim_names or ()):
        raise MeshError(
            f"The mesh {mesh.mesh_dim_names} has the axis 'expert', which divides the same ranks in another way "
            "than the other axes. Give two meshes of the same ranks: (mesh, experts), the second with the dimensions "
            "'efsdp' and 'expert', as init_device_mesh(device, (2, 2), mesh_dim_names=('efsdp', 'expert'))."
        )
    if axes != [axis for axis in _DIVISIONS if axis in axes]:
        raise MeshError(
            f"The dimensions {tuple(found)} of the mesh are the axes {axes}; each is there once, in the order "
            f"{' > '.join(axis for axis in _DIVISIONS if axis in axes)}. Make the mesh in this order: the last axis "
            "has neighbouring ranks."
        )
    return found


def axes_spec(mesh: Any) -> MeshSpec | None:
    """Return the axes of a DeviceMesh that has one beside those of batches, and None for anything else.

    Raises:
        MeshError: See `named_axes`.
    """
    if not _is_device_mesh(mesh):
        return None
    found = named_axes(mesh)
    if {"context", *MODEL_AXES}.isdisjoint(found.values()):
        return None
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    return MeshSpec(**{axis: sizes[name] for name, axis in found.items()})


def without_experts(mesh: Any) -> tuple[Any, DeviceMesh | None]:
    """Return the mesh of all parameters but experts, and that of experts if two meshes are given."""
    if isinstance(mesh, Sequence) and len(mesh) == 2 and all(_is_device_mesh(one) for one in mesh):
        return mesh[0], mesh[1]
    return mesh, None


def without_stages(mesh: Any) -> Any:
    """Return a mesh without the dimensions of a pipeline, whose ranks hold other models; others as they are.

    Raises:
        MeshError: See `named_axes`.
    """
    mesh, experts = without_experts(mesh)
    if experts is not None:
        return without_stages(mesh), without_stages(experts)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    own = tuple(name for name in names if not _STAGES & {*name.lower().split("_")})
    return mesh[own] if own and len(own) < len(names) and {*own} <= named_axes(mesh).keys() else mesh


def _axes(mesh: Any) -> MeshSpec | None:
    """Return the axes of a mesh that has one beside those of data, or names all; None for others."""
    if isinstance(mesh, MeshSpec):
        return None if mesh.is_simple else mesh
    if isinstance(mesh, Mapping):
        return _of_sizes(mesh)
    if (spec := axes_spec(mesh)) is None or len(mesh.mesh_dim_names) == 1:
        return None  # a mesh of one dimension may have any name
    found = named_axes(mesh)
    if "shard" not in found.values():
        at = sum(axis == "replicate" for axis in found.values())
        shape, names = [str(getattr(spec, axis)) for axis in found.values()], [repr(name) for name in found]
        shape.insert(at, "1")
        names.insert(at, "'shard'")
        raise MeshError(
            f"The mesh {tuple(mesh.mesh_dim_names)} has no axis 'shard'. Make it together with the others, of one rank "
            f"if nothing is to be sharded: init_device_mesh(device, ({', '.join(shape)}), mesh_dim_names="
            f"({', '.join(names)}))."
        )
    return spec


def _of_sizes(sizes: Mapping[str, int]) -> MeshSpec:
    for axis, size in sizes.items():
        if axis not in _DIVISIONS:
            meant = f" It is called {axis_of(axis)!r} here." if axis_of(axis) else closest(str(axis), _DIVISIONS)
            raise MeshError(f"{axis!r} is no axis of a mesh.{meant} There are {', '.join(_DIVISIONS)}.")
        if not isinstance(size, int) or isinstance(size, bool) or not (size > 0 or size == -1):
            raise MeshError(f"The axis {axis!r} has {size!r} ranks. Give a number, or -1 for one axis: what is left.")
    is_open = [axis for axis, size in sizes.items() if size == -1]
    if sizes.get("expert") == -1:
        raise MeshError(
            "The axis 'expert' has -1 ranks. It divides the ranks of shard, context and tensor in another way, so that "
            "no number of it is left open: give it."
        )
    if not is_open:
        return _checked(MeshSpec(**sizes))
    (ranks,), known = _shape(None), math.prod(n for axis, n in sizes.items() if n > 0 and axis != "expert")
    if len(is_open) > 1 or ranks % known:
        raise MeshError(
            f"The axes {dict(sizes)} leave no whole number of ranks for {' and '.join(is_open)} in a world of {ranks}. "
            f"Give sizes whose product is {ranks}, and -1 to one axis at most."
        )
    return _checked(MeshSpec(**{**sizes, is_open[0]: ranks // known}))


def _checked(spec: MeshSpec) -> MeshSpec:
    divisible = spec.shard_ranks * spec.tensor
    if divisible % spec.expert:
        axes = [axis for axis in ("shard", "context", "tensor") if getattr(spec, axis) > 1] or ["shard"]
        raise MeshError(
            f"The axis 'expert' has {spec.expert} ranks, which do not divide the {divisible} of {' x '.join(axes)}: it "
            "divides the same ranks in another way. Give a divisor of them, without multiplying: 4 ranks that shard, "
            "of which pairs divide experts, are {'shard': 4, 'expert': 2}."
        )
    return spec


def _with_experts(spec: MeshSpec, mesh: Any, experts: Any) -> MeshSpec:
    """Return a spec with the axis `expert` of a mesh, whose other dimensions must be those that the spec leaves."""
    names, sizes = tuple(experts.mesh_dim_names or ()), tuple(experts.mesh.shape)
    axes = tuple(_SPELLINGS.get(name, name) for name in names)
    if axes not in (EXPERT_AXES, EXPERT_AXES[1:]):
        raise MeshError(
            f"The second mesh of a pair divides experts, and has the dimensions 'efsdp' and 'expert', which may follow "
            f"'replicate'; this one has {names}. A rank's experts are sharded over 'efsdp', and divided over 'expert'."
        )
    found = dict(zip(axes, sizes, strict=True))
    spec = _checked(spec.model_copy(update={"expert": found["expert"]}))
    expected = {axis: spec.sizes((("expert", 0),))["shard" if axis == "efsdp" else axis] for axis in axes}
    if found != expected or (spec.replicate > 1 and "replicate" not in found):
        raise MeshError(
            f"The meshes of a pair are {spec.model_copy(update={'expert': 1})} and "
            f"{' x '.join(map(str, sizes))} ({' x '.join(names)}), but experts divide the same ranks: give the second "
            f"one the sizes {' x '.join(map(str, [spec.replicate, expected['efsdp'], spec.expert]))} (replicate x "
            "efsdp x expert)."
        )
    if mesh.mesh.flatten().tolist() != experts.mesh.flatten().tolist():
        raise MeshError("The meshes of a pair number other ranks, or the same ones in another order.")
    return spec


def _is_device_mesh(mesh: Any) -> bool:
    return hasattr(mesh, "mesh") and hasattr(mesh, "mesh_dim_names")


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
        raise MeshError(
            "A mesh must be a world size, a (replicate, shard) pair, named axes such as {'shard': 4, 'tensor': 2}, or "
            f"a DeviceMesh, got {mesh!r}."
        )
    check_names(getattr(mesh, "mesh_dim_names", None) or ())
    if len(shape) not in (1, 2) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise MeshError(
            f"A mesh must have one dimension (shard) or two (replicate, shard) of at least one rank each, got {shape}."
        )
    return shape


def check_names(names: Sequence[str]) -> None:
    """Check that each dimension for model parallelism is one of `AXES`. A mesh of one dimension may have any name.

    Args:
        names: The names of the dimensions; none for a mesh without names.

    Raises:
        MeshError: One of several dimensions has such a name.
    """
    other = [name for name in names if axis_of(name) is None and _MODEL_PARALLEL & {*name.lower().split("_")}]
    ours = [name for name in names if name not in other]
    if other and ours:
        index = ", ".join(f'"{name}"' for name in ours)
        raise MeshError(
            f"Dimension {other[0]!r} of the mesh {tuple(names)} is for model parallelism, and none of the axes that "
            f"mmfsdp knows: {', '.join(AXES)}. Give mesh[{index}]: the ranks that hold this part of the model."
        )
