"""The engines with DTensors: torch's ``fully_shard`` on every unit of the plan, children before parents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.basics.dtypes import is_floating_point, to_torch
from mmfsdp.basics.torch_releases import SHARDS_INTEGERS, torch_has
from mmfsdp.planning.compiled import is_compiled
from mmfsdp.planning.plan_records import ShardUnit, UnitPrecision
from mmfsdp.planning.policies.matching import own_parameters
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.planning.units import has_forward
from mmfsdp.runtime.calls.casting import compute_in_full_precision
from mmfsdp.runtime.calls.unit_gates import UnitGate
from mmfsdp.runtime.calls.unit_parts import UnitParts
from mmfsdp.runtime.dtensors import data_mesh, data_of_experts
from mmfsdp.runtime.engine import Engine, OptimizerStates, PrepareUnit, Showing, WrapRoot
from mmfsdp.runtime.hooks import watch_shards
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.torch_fsdp2.gathering import shard_versions
from mmfsdp.runtime.torch_fsdp2.iterations import begin_root, discard_iteration
from mmfsdp.runtime.torch_fsdp2.private_names import check_private_names
from mmfsdp.runtime.torch_fsdp2.unit_hooks import mend_unit
from mmfsdp.runtime.whole_params import show_dtensors
from mmfsdp.sharding.compiling import compile_unit
from mmfsdp.sharding.engines.expert_gradients import ExpertGradients
from mmfsdp.state.optimizers.dtensor_optimizer import DTensorStates

__all__ = ["Fsdp2Engine", "ReplicateEngine"]


class Fsdp2Engine(Engine[ShardedModel]):
    """Shards with DTensors, which keep the names and shapes of parameters and gradients."""

    name, is_flat = "fsdp2", False

    def unsupported(self, plan: ShardPlan, device_type: str) -> list[str]:
        problems = []
        if not plan.use_orig_params:
            problems.append("use_orig_params=False needs engine 'fsdp1'.")
        if plan.keep_low_precision_grads:
            problems.append("keep_low_precision_grads=True needs engine 'fsdp1'.")
        if not torch_has(SHARDS_INTEGERS):
            params = (param for unit in plan.units for param in unit.params)
            if first := next((param for param in params if not is_floating_point(param.dtype)), None):
                problems.append(
                    f"{first.fqn} has dtype {first.dtype}, and torch before 2.12 shards floating point only. Install a "
                    "newer torch, store packed weights as bfloat16 (bnb_4bit_quant_storage), or list the parameter in "
                    "sharding.ignored_parameters."
                )
        return problems

    def apply(
        self,
        model: nn.Module,
        plan: ShardPlan,
        mesh: DeviceMesh,
        prepare: PrepareUnit,
        wrap_root: WrapRoot | None = None,
        experts: DeviceMesh | None = None,
    ) -> nn.Module:
        """See `Engine.apply`. Returns ``model`` itself, sharded in place."""
        offload, data = _offload_policy(plan, mesh), data_mesh(mesh)
        expert_data = data if experts is None else data_of_experts(experts)
        divide_gradients = ExpertGradients(expert_data, plan.mesh.data_size)
        first_called: dict[str, nn.Module] = {}
        for unit in plan.units:
            prepare(unit)
            # Preparing a unit may replace parameters, so look them up again. Keep no others: sharding frees them.
            ignored = {model.get_parameter(param.fqn) for param in plan.ignored_params}
            units = [model.get_submodule(fqn) for fqn in unit.fqns]
            modules = units if unit.is_root else [part for module in units for part in _called_parts(module)]
            first_called[unit.fqn] = modules[0]
            if unit.precision.full_precision:
                for module in modules:
                    compute_in_full_precision(module)
            compile_unit(modules, unit, plan)
            policy = _mixed_precision(unit.precision)
            fully_shard(
                modules[0] if len(modules) == 1 else modules,
                mesh=expert_data if unit.has_experts else data,
                reshard_after_forward=_reshard(unit, plan),
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=ignored or None,
            )
            check_private_names(modules[0])  # type: ignore[arg-type] # its class has changed
            mend_unit(modules)
            if unit.has_experts:
                divide_gradients(modules[0], policy)
            for module in modules:
                _keep_class_name(module)
        _set_prefetching(model, plan, first_called)
        return model

    def watch(self, state: ShardedModel, parts: Sequence[tuple[UnitParts, Callable[[], None]]]) -> Sequence[UnitGate]:
        return watch_shards(state, parts)

    def begin_root(self, state: ShardedModel) -> None:
        begin_root(_root(state))

    def set_sync(self, state: ShardedModel, sync: bool) -> None:
        _root(state).set_requires_gradient_sync(sync)

    def version(self, state: ShardedModel) -> int | None:
        return shard_versions(state.groups)

    def discard_forward(self, state: ShardedModel) -> None:
        discard_iteration(_root(state))
        self.free(state)

    def free(self, state: ShardedModel) -> None:
        for group in state.groups:
            group.reshard()

    def clip(self, state: ShardedModel, max_norm: float, norm_type: float) -> torch.Tensor | None:
        return None

    def units(self, state: ShardedModel) -> list[nn.Module]:
        return [state.module.get_submodule(unit.fqn) for unit in state.plan.units]

    def show_whole(
        self, state: ShardedModel, module: nn.Module, how: Showing
    ) -> tuple[list[tuple[nn.Module, str]], AbstractContextManager[None]]:
        return show_dtensors(state, module, how)

    def shows_pieces(self, state: ShardedModel) -> bool:
        return True

    def weights(self, state: ShardedModel) -> dict[str, Any]:
        state.reshard()
        return dict(state.module.state_dict())

    def targets(self, state: ShardedModel, kinds: Mapping[str, str] | None) -> dict[str, Any] | None:
        return self.weights(state)

    def optimizer_states(self, state: ShardedModel, optimizer: Optimizer) -> OptimizerStates:
        return DTensorStates(state, optimizer)


class ReplicateEngine(Fsdp2Engine):
    """Every rank holds everything and gradients are averaged, as with DDP.

    It is ``fully_shard`` on a mesh whose shard groups have one rank each: public API, and mixed precision, clipping,
    accumulation and state dicts work as they do when sharded.
    """

    name = "replicate"

    def unsupported(self, plan: ShardPlan, device_type: str) -> list[str]:
        problems = super().unsupported(plan, device_type)
        if plan.mesh.shard != 1:
            problems.append(f"a mesh of {plan.mesh} shards; plan with strategy 'NO_SHARD'.")
        return problems


def _root(state: ShardedModel) -> FSDPModule:
    root = state.module
    assert isinstance(root, FSDPModule)
    return root


def _reshard(unit: ShardUnit, plan: ShardPlan) -> bool | int | None:
    # None is torch's own rule for the root: it stays gathered until backward, which begins with it.
    if unit.is_root and unit.reshard_after_forward is True:
        return None
    return unit.reshard_after_forward


def _mixed_precision(precision: UnitPrecision) -> MixedPrecisionPolicy:
    def torch_dtype(name: str | None) -> torch.dtype | None:
        return None if name is None else to_torch(name)

    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.param_dtype),
        # Always explicit, because the meaning of None differs between torch 2.13 and 2.15.
        reduce_dtype=torch_dtype(precision.reduce_dtype or precision.param_dtype),
        output_dtype=torch_dtype(precision.output_dtype),
        cast_forward_inputs=precision.cast_forward_inputs,
    )


def _offload_policy(plan: ShardPlan, mesh: DeviceMesh) -> OffloadPolicy:
    if not plan.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=plan.pin_memory and mesh.device_type != "cpu")


def _set_prefetching(model: nn.Module, plan: ShardPlan, first_called: dict[str, nn.Module]) -> None:
    order = {fqn: index for index, (fqn, _) in enumerate(model.named_modules())}
    units = sorted((unit for unit in plan.units if unit.params), key=lambda unit: order[unit.fqn])
    modules = [first_called[unit.fqn] for unit in units]
    for index, module in enumerate(modules):
        if not isinstance(module, FSDPModule):
            continue
        if plan.forward_prefetch:
            following = modules[index + 1 : index + 1 + plan.forward_prefetch]
            module.set_modules_to_forward_prefetch([m for m in following if isinstance(m, FSDPModule)])
        if plan.backward_prefetch != "pre":
            # 'pre' is the default of fully_shard. A list of only the module itself leaves nothing to gather ahead.
            module.set_modules_to_backward_prefetch([module])


def _called_parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose calls begin and end the use of a unit's parameters.

    That is the unit's module, unless it is an ``nn.Sequential`` that is not compiled: vision models often iterate over
    one (``for layer in self.layers``) and never call it. Its children are called either way.

    Args:
        module: A module of a unit; all units below it are sharded already.
    """
    if not _only_holds(module) or is_compiled(module):
        return [module]
    return list({id(part): part for part in _parts(module)}.values()) or [module]


def _only_holds(module: nn.Module) -> bool:
    """Return whether a module has no parameters of its own, and only calls its children in turn or is never called."""
    runs_in_turn = type(module).forward is nn.Sequential.forward
    return (runs_in_turn or not has_forward(module)) and not own_parameters(module)


def _parts(container: nn.Module) -> list[nn.Module]:
    parts = []
    for child in container.children():
        if isinstance(child, FSDPModule):
            continue
        if _only_holds(child):
            parts += _parts(child)
        elif any(not isinstance(param, DTensor) for param in child.parameters()):
            parts.append(child)
    return parts


def _keep_class_name(module: nn.Module) -> None:
    """Give the class that ``fully_shard`` made the name of the original, for imports and messages.

    transformers uses ``str(type(model))`` to look up which outputs, such as hidden states, a model can record.

    Args:
        module: A module that was just sharded.
    """
    sharded = type(module)
    original = sharded.__mro__[2]  # torch makes it as class FSDPName(FSDPModule, Name)
    sharded.__module__, sharded.__qualname__ = original.__module__, original.__qualname__
    sharded.__name__ = original.__name__
