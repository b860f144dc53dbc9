"""The compatibility engine: torch's FullyShardedDataParallel around every unit of the plan.

It serves settings that need flat parameters, and code that checks ``isinstance(module, FullyShardedDataParallel)``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from mmfsdp.basics.dtypes import to_torch
from mmfsdp.basics.text import clean_fqn
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.calls.casting import compute_in_full_precision
from mmfsdp.runtime.fsdp1.flat_params import keep_param_order
from mmfsdp.sharding.compiling import compile_unit
from mmfsdp.sharding.devices import device_of
from mmfsdp.sharding.engines.engine import PrepareUnit, WrapRoot

__all__ = ["Fsdp1Engine", "unit_arguments", "wrap_units"]


class Fsdp1Engine:
    """Shards with flat parameters."""

    name = "fsdp1"

    def unsupported(self, plan: ShardPlan, device_type: str) -> list[str]:
        """See `Engine.unsupported`."""
        problems = []
        if any(not isinstance(unit.reshard_after_forward, bool) for unit in plan.units):
            problems.append("resharding to a smaller group after forward needs engine 'fsdp2'.")
        if any(unit.precision.output_dtype for unit in plan.units):
            problems.append("precision.output_dtype needs engine 'fsdp2'.")
        if plan.cpu_offload and device_type == "cpu":
            problems.append("cpu_offload on a CPU device needs engine 'fsdp2' (and saves nothing there).")
        if plan.forward_prefetch > 1:
            problems.append("forward prefetch of more than one unit needs engine 'fsdp2'.")
        if plan.strategy == "NO_SHARD" or plan.mesh.shard == 1:  # torch 2.9 to 2.13 fails in the first forward
            frozen = (unit.params for unit in plan.units if not any(param.requires_grad for param in unit.params))
            tied = [param for params in frozen for param in params if param.aliases]
            problems += [
                f"{param.fqn} is tied to {param.aliases[0]} in a unit whose parameters are all frozen, which torch's "
                "FSDP1 does not support where each rank holds whole parameters: use engine 'replicate' or 'fsdp2'."
                for param in tied
            ]
        return problems

    def apply(
        self,
        model: nn.Module,
        plan: ShardPlan,
        mesh: DeviceMesh,
        prepare: PrepareUnit,
        wrap_root: WrapRoot | None = None,
    ) -> nn.Module:
        """See `Engine.apply`. Returns the ``FullyShardedDataParallel`` around ``model``."""
        order = {module: [*module._parameters] for module in model.modules()}
        wrap_units(model, plan, mesh, prepare)
        prepare(plan.root)
        compile_unit([model], plan.root, plan)
        arguments = unit_arguments(model, plan, plan.root, mesh)
        root = FullyShardedDataParallel(model, **arguments) if wrap_root is None else wrap_root(model, arguments)
        keep_param_order(root, order)
        return root


def wrap_units(model: nn.Module, plan: ShardPlan, mesh: DeviceMesh, prepare: PrepareUnit) -> None:
    """Wrap every unit below the root, in place. Collective: every rank of ``mesh``."""
    for unit in plan.units[:-1]:
        prepare(unit)
        module = model.get_submodule(unit.fqn)
        if unit.precision.full_precision:
            compute_in_full_precision(module)
        compile_unit([module], unit, plan)
        wrapped = FullyShardedDataParallel(module, **unit_arguments(model, plan, unit, mesh))
        for parent in list(model.modules()):
            if parent is wrapped:
                continue
            for name, child in list(parent._modules.items()):  # also where it is registered a second time
                if child is module and not isinstance(parent, FullyShardedDataParallel):
                    setattr(parent, name, wrapped)


def unit_arguments(model: nn.Module, plan: ShardPlan, unit: ShardUnit, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the arguments with which FullyShardedDataParallel wraps one unit of the plan."""
    named = {clean_fqn(name): param for name, param in model.named_parameters()}
    mixed = None
    stored_as_used = unit.precision.full_precision and all(param.dtype == "float32" for param in unit.params)
    if not stored_as_used and (unit.precision.param_dtype or unit.precision.reduce_dtype):
        mixed = MixedPrecision(
            param_dtype=_torch_dtype(unit.precision.param_dtype),
            reduce_dtype=_torch_dtype(unit.precision.reduce_dtype or unit.precision.param_dtype),
            keep_low_precision_grads=plan.keep_low_precision_grads,
            cast_forward_inputs=unit.precision.cast_forward_inputs,
            cast_root_forward_inputs=unit.precision.cast_forward_inputs,
            _module_classes_to_ignore=(),  # the plan made them units of their own
        )
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    return {
        "device_mesh": mesh if plan.mesh.replicate > 1 and plan.mesh.shard > 1 else mesh[mesh.mesh_dim_names[0]],  # type: ignore[index]
        "sharding_strategy": _strategy(unit, plan),
        "cpu_offload": CPUOffload(offload_params=True) if plan.cpu_offload else None,
        "mixed_precision": mixed,
        "backward_prefetch": prefetch[plan.backward_prefetch],
        "forward_prefetch": plan.forward_prefetch > 0,
        "use_orig_params": plan.use_orig_params,
        "device_id": device_of(mesh),
        "ignored_states": [named[param.fqn] for param in plan.ignored_params] or None,
    }


def _strategy(unit: ShardUnit, plan: ShardPlan) -> ShardingStrategy:
    if plan.strategy == "NO_SHARD" or (plan.mesh.shard == 1 and plan.mesh.replicate > 1):
        return ShardingStrategy.NO_SHARD
    if plan.mesh.replicate > 1:
        return ShardingStrategy.HYBRID_SHARD if unit.reshard_after_forward else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if unit.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP


def _torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else to_torch(name)
