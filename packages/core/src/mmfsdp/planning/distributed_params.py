"""Reads how tensor parallelism has divided parameters before a model is sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.errors import PlanError
from mmfsdp.planning.mesh import MODEL_AXES, axis_of
from mmfsdp.planning.plan_records import MeshSpec, ParamEntry
from mmfsdp.planning.policies.matching import Match, own_parameters

__all__ = ["check_divided", "divided_by", "divided_tensors", "expert_matches"]

_DIVIDING = (*MODEL_AXES, "expert")


def divided_tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and buffers that are DTensors by name, each once. Not collective."""
    if (module := sys.modules.get("torch.distributed.tensor")) is None:
        return  # it takes time to import, and nothing is a DTensor without it
    for tensors in (model.named_parameters(), model.named_buffers()):
        yield from ((fqn, tensor) for fqn, tensor in tensors if isinstance(tensor, module.DTensor))


def divided_by(tensor: torch.Tensor) -> tuple[tuple[str, int], ...]:
    """Return the axes that divide a tensor, in their order, each with the dimension that it divides. Not collective.

    Args:
        tensor: A tensor of a model that is not sharded yet; nothing divides a plain one.
    """
    if (module := sys.modules.get("torch.distributed.tensor")) is None or not isinstance(tensor, module.DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ("unnamed",) * tensor.device_mesh.ndim
    return tuple(
        (axis_of(name) or name, placement.dim)
        for name, placement in zip(names, tensor.placements, strict=True)
        if not placement.is_replicate()
    )


def check_divided(model: nn.Module, mesh: MeshSpec, ignored: set[int], by_rules: Iterable[str] = ()) -> None:
    """Check that the DTensors of a model are divided along the axes of a mesh, as tensor parallelism does.

    Args:
        model: A model that is about to be planned.
        mesh: The ranks that it is planned for.
        ignored: ``id`` of parameters that are not sharded, however they are divided.
        by_rules: The axes along which rules will divide the model.

    Raises:
        PlanError: A tensor is divided along an axis that the mesh has not, or its ranks hold parts of a sum; or nothing
            is divided along an axis of the mesh.
    """
    used = {*by_rules}
    for fqn, tensor in divided_tensors(model):
        if id(tensor) in ignored:
            continue
        kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Buffer"
        said = f"{kind} {fqn!r} is divided already: a DTensor placed as {tuple(tensor.placements)} on {_mesh(tensor)}"
        own = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.device_mesh.mesh.shape, strict=False))
        axes = {axis_of(name) or name: size for name, size in own.items()}
        if len(own) != 1 or {*axes} - {*_DIVIDING}:
            raise PlanError(
                f"{said}. A model is divided along the axis 'tensor' or 'expert' before it is sharded; name the mesh's "
                'dimensions, and divide over mesh["tensor"]: mesh = init_device_mesh(device, (..., ...), '
                'mesh_dim_names=("shard", "tensor")). If the model is part of a sharded one, plan the original model.',
                fqn=fqn,
            )
        if wrong := [axis for axis, size in axes.items() if getattr(mesh, axis) != size]:
            raise PlanError(
                f"{said}, but the model is planned for {mesh}. Give the mesh that {wrong[0]!r} is an axis of, "
                "beside an axis 'shard', which may have one rank: mmfsdp.shard(model, config, mesh), where you divided "
                f"over mesh[{wrong[0]!r}].",
                fqn=fqn,
            )
        if any(placement.is_partial() for placement in tensor.placements):
            raise PlanError(f"{said}: its ranks hold parts of a sum, which cannot be sharded.", fqn=fqn)
        used |= {axis for axis, _ in divided_by(tensor)}
    for axis in _DIVIDING:
        if getattr(mesh, axis) > 1 and axis not in used:
            same = "hold all experts" if axis == "expert" else "all compute the same"
            raise PlanError(
                f"The mesh is {mesh}, but no parameter is divided along {axis!r}: its ranks would {same}. Give "
                "parallel='auto' or rules; or divide the model before you shard it: "
                f'torch.distributed.tensor.parallel.parallelize_module(model, mesh["{axis}"], ...); or give a mesh '
                "without this axis.",
                fqn="",
            )


def expert_matches(model: nn.Module, entries: Mapping[int, ParamEntry], ignored: set[int]) -> list[Match]:
    """Return the modules whose own parameters the axis ``expert`` divides, each of which is a shard unit of its own.

    Args:
        model: A model that is about to be planned.
        entries: Its parameters by ``id``.
        ignored: ``id`` of parameters that are not sharded.
    """
    if not any("expert" in dict(entry.divided) for entry in entries.values()):
        return []
    reason = "experts, which are sharded over other ranks than all else"
    found = []
    for fqn, module in model.named_modules():
        axes = [dict(entries[id(param)].divided) for param in own_parameters(module) if id(param) not in ignored]
        if any("expert" in divided for divided in axes):
            found.append(Match(fqn, module, reason))
    return found


def _mesh(tensor: Any) -> str:
    mesh = tensor.device_mesh
    sizes = tuple(mesh.mesh.shape)
    if mesh.mesh_dim_names is None:
        return f"a mesh without names ({' x '.join(map(str, sizes))})"
    return "(" + ", ".join(f"{name}: {size}" for name, size in zip(mesh.mesh_dim_names, sizes, strict=True)) + ")"
