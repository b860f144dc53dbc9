"""Shards a model as a plan says, in the same way on every rank: `shard` and `apply_plan`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.basics.references import resolve_reference
from mmfsdp.collective.scopes import scope_of
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, MeshError, PlanError, PlanMismatchError
from mmfsdp.planning.distributed_params import divided_tensors
from mmfsdp.planning.fingerprints import fingerprint
from mmfsdp.planning.mesh import without_experts
from mmfsdp.planning.plan_records import Note, ShardUnit
from mmfsdp.planning.policies.forms import Policy
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.calls.pending_inputs import wait_before_compiled
from mmfsdp.runtime.calls.unit_parts import UnitParts, parts_of_units
from mmfsdp.runtime.engine import WrapRoot
from mmfsdp.runtime.gathered.kept_params import named_references, replace_kept
from mmfsdp.runtime.gathered.lost_writes import LostWrites
from mmfsdp.runtime.gathered.recurrent_weights import leave_weights_in_place
from mmfsdp.runtime.gradients.gradient_hooks import check_gradient_hooks
from mmfsdp.runtime.hooks import install_hooks
from mmfsdp.runtime.ranks.buffers import keep_buffers_alike
from mmfsdp.runtime.ranks.model_axes import check_foreign, watch_model_axes
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.sharded_params import average_on_shards
from mmfsdp.sharding.activation import apply_activation_checkpointing
from mmfsdp.sharding.agreement import Agreement, check_same_machine, check_same_plan, check_same_versions
from mmfsdp.sharding.compiling import check_backend
from mmfsdp.sharding.device_mesh import build_expert_mesh, build_mesh, check_groups, check_mesh, own_part, shape_of
from mmfsdp.sharding.devices import (
    backends_of,
    check_offload,
    current_accelerator,
    pick_device_type,
    select_device,
    select_device_for_objects,
)
from mmfsdp.sharding.dividing import UnitDivider
from mmfsdp.sharding.engines import ENGINES
from mmfsdp.sharding.initialise import UnitPreparer
from mmfsdp.sharding.materialise import InitFn

if TYPE_CHECKING:
    from mmfsdp.config.written import ShardSettings

__all__ = ["apply_plan", "check_supported", "shard", "shard_in_place"]


Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    config: ShardConfig | Mapping[str, Any] | None = None,
    mesh: Any = None,
    *,
    policy: Policy = None,
    check_fn: Callable[[nn.Module], bool] | None = None,
    param_init_fn: InitFn | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    wrap_root: WrapRoot | None = None,
    **settings: Unpack[ShardSettings],
) -> Model:
    """Plan and apply in one call. Collective: every rank of the mesh, with equal models and settings.

    Args:
        model: The model, on any device; on ``meta`` it needs no memory for a whole copy.
        config: The settings; a mapping is validated and not changed.
        mesh: A DeviceMesh, a pair of them of which the second is of experts, a process group, a (replicate, shard)
            pair of groups, or None for all ranks.
        policy: See `plan`.
        check_fn: See `plan`.
        param_init_fn: See `apply_plan`.
        ignored_modules: See `plan`.
        ignored_params: See `plan`.
        wrap_root: See `apply_plan`.
        **settings: Settings of `ShardConfig`, such as ``precision="bf16"``; each overrides the one in ``config``.

    Returns:
        The sharded model: ``model`` itself, or with engine ``fsdp1`` the FullyShardedDataParallel around it, which
        passes attributes on to ``model``. To type checkers it has the type of ``model``.

    Raises:
        RankMismatchError: Ranks have different models, settings, versions or devices; raised on every rank before
            anything is changed.
        LostRankError: A rank died or does not take part. The model is then half sharded: build a new one.
        MmfsdpError: See `plan` and `apply_plan`; if one rank fails, all ranks raise.
    """

    def decide() -> ShardPlan:
        return make_plan(
            model,
            config,
            shape_of(mesh),
            policy=policy,
            check_fn=check_fn,
            ignored_modules=ignored_modules,
            ignored_params=ignored_params,
            **settings,
        )

    return cast(Model, _carry_out(model, decide, mesh, param_init_fn, wrap_root))


def apply_plan(
    model: Model,
    plan: ShardPlan,
    mesh: Any = None,
    *,
    param_init_fn: InitFn | None = None,
    wrap_root: WrapRoot | None = None,
) -> Model:
    """Shard ``model`` as ``plan`` says. Collective: every rank of the mesh.

    The steps are: check that the model fits the plan and is the same on every rank; apply activation checkpointing;
    then for each unit, children before parents, initialise its weights if they are on the meta device, move them to the
    device, broadcast them from the mesh's first rank, divide them by the rules of ``parallel``, and shard them.

    Args:
        model: The model that the plan was made for.
        plan: The plan to apply.
        mesh: A DeviceMesh, a pair of them of which the second is of experts, a process group, a (replicate, shard)
            pair of groups, or None for all ranks.
        param_init_fn: ``(module) -> None``, initialises a model on the meta device. It is called as ``model.apply``
            would: for every module, children before parents, once tensors are allocated. Default: the plan's reference,
            or ``module.reset_parameters()``.
        wrap_root: ``(module, arguments) -> module``, makes the FullyShardedDataParallel around the root instead of the
            class itself; only engine ``fsdp1`` calls it.

    Returns:
        The sharded model: ``model`` itself, or with engine ``fsdp1`` the FullyShardedDataParallel around it, which
        passes attributes on to ``model``. To type checkers it has the type of ``model``.

    Raises:
        PlanMismatchError: The plan was made for another model.
        PlanError: Weights on the meta device cannot be initialised to the values of the unsharded model; or the model
            is a list or dict of modules, which cannot be called.
        MeshError: The mesh does not have the plan's shape.
        ConfigError: The engine cannot carry out the plan.
        RankMismatchError: Ranks have different models, plans, versions or devices; raised on every rank before
            anything is changed.
        LostRankError: A rank died or does not take part. The model is then half sharded: build a new one.
    """
    return cast(Model, _carry_out(model, lambda: plan, mesh, param_init_fn, wrap_root))


def _carry_out(
    model: nn.Module,
    decide: Callable[[], ShardPlan],
    mesh: Any,
    param_init_fn: InitFn | None,
    wrap_root: WrapRoot | None,
) -> nn.Module:
    check_groups(mesh)
    given, mesh = mesh, own_part(mesh)
    (whole, experts), (first, _) = without_experts(mesh), without_experts(given)
    is_stage = whole is not first and whole.size() < first.size()
    select_device_for_objects()
    scope = scope_of(whole)
    check_same_versions(scope)
    decided = on_all_ranks(lambda: _checked(model, decide()), scope)
    check_same_plan(model, decided, scope)
    if decided.device != "cpu":
        check_same_machine(scope)

    def on_device() -> ShardPlan:
        check_mesh(decided.mesh, mesh)
        return _on_device(decided, whole)

    plan = on_all_ranks(on_device, scope)
    device_mesh = build_mesh(plan.mesh, plan.device, mesh)

    def ready() -> UnitPreparer:
        check_supported(plan, device_mesh)
        check_gradient_hooks(model, plan, calls_some=False)
        check_foreign(model, plan, device_mesh, experts)
        if plan.cpu_offload and not ENGINES[plan.engine].is_flat:
            check_offload(device_mesh.device_type, backends_of(device_mesh.get_group(0)))
        if plan.compile is not None:
            check_backend(plan.compile)
        init_fn = param_init_fn or (resolve_reference(plan.param_init_fn) if plan.param_init_fn else None)
        preparer = UnitPreparer(model, plan, device_mesh, init_fn, experts)
        if plan.activation_checkpointing is not None:
            apply_activation_checkpointing(model, plan.activation_checkpointing)
        return preparer

    former = named_references(model)
    parts = parts_of_units(model, plan)
    prepare = on_all_ranks(ready, scope)
    is_divided = bool(plan.parallel) or any(divided_tensors(model))
    expert_mesh = build_expert_mesh(plan.mesh, plan.device) if experts is None else experts
    divide = UnitDivider(model, plan, device_mesh, expert_mesh)

    def make_ready(unit: ShardUnit) -> None:
        prepare(unit, agreed)
        divide(unit)

    with Agreement(scope) as agreed:
        sharded = ENGINES[plan.engine].apply(model, plan, device_mesh, make_ready, wrap_root, expert_mesh)
    state = _finished(sharded, plan, device_mesh, parts, former)
    state.is_stage = is_stage
    if state.groups:
        state.lost_writes = LostWrites(sharded, state.groups)
    watch_model_axes(state)
    if is_divided:
        wait_before_compiled(state.module)
    return state.module


def shard_in_place(model: nn.Module, plan: ShardPlan, mesh: DeviceMesh) -> ShardedModel:
    """Shard a model as `apply_plan` does, without an agreement between ranks. Collective only for some engines.

    Args:
        model: A model whose tensors have values, the same on every rank.
        plan: A plan for it, which is not checked against the model, and divides nothing by rules.
        mesh: A mesh of the plan's shape on the device to compute on.

    Returns:
        The state of the sharded model, whose ``module`` is the one to call. Keep the module: the state does not.

    Raises:
        ConfigError: The engine cannot carry out the plan.
    """
    check_supported(plan, mesh)
    prepare = UnitPreparer(model, plan.model_copy(update={"sync_states": False}), mesh)
    if plan.activation_checkpointing is not None:
        apply_activation_checkpointing(model, plan.activation_checkpointing)
    former = named_references(model)
    parts = parts_of_units(model, plan)
    sharded = ENGINES[plan.engine].apply(model, plan, mesh, prepare.alone)
    return _finished(sharded, plan, mesh, parts, former)


def check_supported(plan: ShardPlan, mesh: DeviceMesh) -> None:
    """Check that the plan's engine can carry it out on a mesh.

    Raises:
        ConfigError: The engine cannot; the message says what to write instead.
    """
    if problems := ENGINES[plan.engine].unsupported(plan, mesh.device_type):
        raise ConfigError(f"Engine {plan.engine!r} cannot carry out this plan: " + " ".join(problems))


def _finished(
    sharded: nn.Module,
    plan: ShardPlan,
    mesh: DeviceMesh,
    parts: Iterable[UnitParts],
    former: Mapping[str, weakref.ref[nn.Parameter]],
) -> ShardedModel:
    state = ShardedModel(sharded, plan, mesh, ENGINES[plan.engine], former.values())
    replace_kept(sharded, former)
    install_hooks(state, parts)
    if state.groups or state.is_fsdp1:
        average_on_shards(sharded)
        leave_weights_in_place(sharded)
    if plan.broadcast_buffers and plan.mesh.world_size > 1 and plan.buffers:
        keep_buffers_alike(sharded)
    return state


def _checked(model: nn.Module, plan: ShardPlan) -> ShardPlan:
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and type(model).forward is nn.Module.forward:
        raise PlanError(
            f"The model is a {type(model).__name__}, which has no forward(), so nothing would gather its parameters. "
            "Put it into a module whose forward() calls what it holds, and shard that; or shard each module that it "
            "holds.",
            fqn="",
        )
    found = fingerprint(model)
    if found != plan.fingerprint:
        raise PlanMismatchError(
            f"This plan was made for another model: its fingerprint is {plan.fingerprint}, the model's is {found}. "
            "Names, shapes, dtypes, requires_grad and module classes must be the same. Make a new plan."
        )
    return plan


def _on_device(plan: ShardPlan, mesh: Any) -> ShardPlan:
    """Return the plan with the device type that it will run on, and make this rank's device the current one."""
    if isinstance(mesh, DeviceMesh):
        if plan.device not in ("auto", mesh.device_type):
            raise MeshError(
                f"init.device is {plan.device!r}, but the mesh is on {mesh.device_type!r}. Drop one of the two.",
                config="init.device",
            )
        device, why = mesh.device_type, None
    else:
        device, why = pick_device_type(plan.device, current_accelerator(), backends_of())
    select_device(device)
    notes = plan.notes if why is None else (*plan.notes, Note(kind="device", text=why))
    return plan.model_copy(update={"device": device, "notes": notes})
