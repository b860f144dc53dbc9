"""The compatibility engine: torch's FullyShardedDataParallel around every unit of the plan.

It serves settings that need flat parameters, and code that checks ``isinstance(module, FullyShardedDataParallel)``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.optim import Optimizer

from mmfsdp.basics.dtypes import to_torch
from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.steps import any_of
from mmfsdp.errors import StateDictError, UnsupportedCallError
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.calls.casting import compute_in_full_precision
from mmfsdp.runtime.calls.unit_gates import FlatGate, UnitGate
from mmfsdp.runtime.calls.unit_parts import UnitParts
from mmfsdp.runtime.engine import Engine, OptimizerStates, PrepareUnit, Showing, WrapRoot
from mmfsdp.runtime.fsdp1.flat_backwards import complete_backwards, refuse_unseen_backwards, show_outputs
from mmfsdp.runtime.fsdp1.flat_params import free_flat_params, is_flat_gathered, keep_param_order, name_gathering
from mmfsdp.runtime.gathered.other_weights import refuse_other_flat_weights
from mmfsdp.runtime.gradients.graph_inputs import refuse_flat_gradients
from mmfsdp.runtime.gradients.hidden_outputs import HiddenOutputs
from mmfsdp.runtime.refusals.frameworks import guard_save_pretrained, refuse_copies
from mmfsdp.runtime.refusals.late_freezing import refuse_late_freezing
from mmfsdp.runtime.roles import check_roles
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.sharding.compiling import compile_unit
from mmfsdp.sharding.devices import device_of
from mmfsdp.state.alike import check_alike
from mmfsdp.state.extra_states import EXTRA_STATE
from mmfsdp.state.flat_load import flat_targets
from mmfsdp.state.optimizers.flat_optimizer import FlatStates

__all__ = ["Fsdp1Engine"]


_OPEN_NO_SYNC = "_mmfsdp_open_no_sync"


class Fsdp1Engine(Engine[ShardedModel]):
    """Shards with flat parameters."""

    name, is_flat = "fsdp1", True

    def unsupported(self, plan: ShardPlan, device_type: str) -> list[str]:
        problems = []
        if not plan.mesh.is_simple:
            problems.append("axes beside 'replicate' and 'shard' need engine 'fsdp2'.")
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
        experts: DeviceMesh | None = None,
    ) -> nn.Module:
        """See `Engine.apply`. Returns the ``FullyShardedDataParallel`` around ``model``."""
        order = {module: [*module._parameters] for module in model.modules()}
        _wrap_units(model, plan, mesh, prepare)
        prepare(plan.root)
        compile_unit([model], plan.root, plan)
        arguments = _unit_arguments(model, plan, plan.root, mesh)
        root = FullyShardedDataParallel(model, **arguments) if wrap_root is None else wrap_root(model, arguments)
        keep_param_order(root, order)
        return root

    def watch(self, state: ShardedModel, parts: Sequence[tuple[UnitParts, Callable[[], None]]]) -> Sequence[UnitGate]:
        me, root = weakref.ref(state), state.module
        name_gathering(root)
        refuse_unseen_backwards(root)
        complete_backwards(root)
        refuse_late_freezing(root, lambda: live.writes if (live := me()) is not None else 0)
        refuse_flat_gradients(root)
        guard_save_pretrained(root.get_submodule("module"))
        refuse_copies(root)
        refuse_other_flat_weights(root)
        wrappers = {id(unit.module): unit for unit in FullyShardedDataParallel.fsdp_modules(root)}
        units = [(wrappers[id(part.modules[0])], part, begin) for part, begin in parts]
        return [FlatGate(unit, HiddenOutputs(unit, part.owned, show_outputs), begin) for unit, part, begin in units]

    def begin_root(self, state: ShardedModel) -> None:
        if not state.is_running:
            with FullyShardedDataParallel.summon_full_params(state.module, recurse=False, writeback=False):
                pass

    def set_sync(self, state: ShardedModel, sync: bool) -> None:
        """See `Engine.set_sync`.

        FSDP1 reads its flag in backward, which may run after the user's no_sync() block: torch's context stays open
        until a forward outside of it. It references the module, so only the module may reference it.
        """
        root = state.module
        if sync:
            vars(root).pop(_OPEN_NO_SYNC).__exit__(None, None, None)
        else:
            vars(root)[_OPEN_NO_SYNC] = context = FullyShardedDataParallel.no_sync(root)  # type: ignore[arg-type]
            context.__enter__()

    def version(self, state: ShardedModel) -> int | None:
        return None  # gathering changes its parameters themselves

    def discard_forward(self, state: ShardedModel) -> None:
        pass  # torch begins anew itself

    def free(self, state: ShardedModel) -> None:
        free_flat_params(state.module)

    def clip(self, state: ShardedModel, max_norm: float, norm_type: float) -> torch.Tensor | None:
        root = state.module
        check_roles(state.roles(root.parameters()), "The model given to clip_grad_norm_()")
        with Waiting("computing the norm of all gradients"):
            # By class: a wrapper's own method of this name ends here.
            return FullyShardedDataParallel.clip_grad_norm_(root, max_norm, norm_type)  # type: ignore[arg-type]

    def units(self, state: ShardedModel) -> list[nn.Module]:
        return [*FullyShardedDataParallel.fsdp_modules(state.module)]

    def show_whole(
        self, state: ShardedModel, module: nn.Module, how: Showing
    ) -> tuple[list[tuple[nn.Module, str]], AbstractContextManager[None]]:
        if how.with_grads and not state.plan.use_orig_params:
            raise UnsupportedCallError("with_grads=True needs use_orig_params=True: a flat parameter has one gradient.")
        units: list[nn.Module] = [*FullyShardedDataParallel.fsdp_modules(module)]
        return [(unit, "") for unit in units if how.recurse or unit is module], _summoned(state, module, how)

    def shows_pieces(self, state: ShardedModel) -> bool:
        return not is_flat_gathered(state.module)

    def weights(self, state: ShardedModel) -> dict[str, Any]:
        state.reshard()
        try:
            return dict(get_model_state_dict(state.module))
        except AttributeError as error:  # torch looks for the extra state of a wrapped module as an attribute
            if EXTRA_STATE not in str(error):
                raise
            raise StateDictError(
                "With engine 'fsdp1' torch cannot save the extra state (get_extra_state) of a module that is a shard "
                "unit itself. Write engine 'fsdp2', or a wrap policy whose units contain that module."
            ) from error

    def targets(self, state: ShardedModel, kinds: Mapping[str, str] | None) -> dict[str, Any] | None:
        if kinds is not None and any_of(state.scope, "a shard" in kinds.values()):
            check_alike(kinds, "the state dict", state.scope)
            return None
        return flat_targets(state)

    def optimizer_states(self, state: ShardedModel, optimizer: Optimizer) -> OptimizerStates:
        return FlatStates(state, optimizer)


@contextmanager
def _summoned(state: ShardedModel, module: nn.Module, how: Showing) -> Iterator[None]:
    root = state.module
    assert isinstance(root, FullyShardedDataParallel)
    root.check_is_root()  # otherwise torch takes the part for a root of its own
    # On a CPU device there is nothing to offload, and torch fails when it tries.
    offload = how.cpu_offload and state.mesh.device_type != "cpu"
    with FullyShardedDataParallel.summon_full_params(
        module, how.recurse, how.writeback, how.rank0_only, offload_to_cpu=offload, with_grads=how.with_grads
    ):
        yield


def _wrap_units(model: nn.Module, plan: ShardPlan, mesh: DeviceMesh, prepare: PrepareUnit) -> None:
    """Wrap every unit below the root, in place. Collective: every rank of ``mesh``."""
    for unit in plan.units[:-1]:
        prepare(unit)
        module = model.get_submodule(unit.fqn)
        if unit.precision.full_precision:
            compute_in_full_precision(module)
        compile_unit([module], unit, plan)
        wrapped = FullyShardedDataParallel(module, **_unit_arguments(model, plan, unit, mesh))
        for parent in list(model.modules()):
            if parent is wrapped:
                continue
            for name, child in list(parent._modules.items()):  # also where it is registered a second time
                if child is module and not isinstance(parent, FullyShardedDataParallel):
                    setattr(parent, name, wrapped)


def _unit_arguments(model: nn.Module, plan: ShardPlan, unit: ShardUnit, mesh: DeviceMesh) -> dict[str, Any]:
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
