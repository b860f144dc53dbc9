"""Runs a step of training on fake tensors in a fake world, and records what one rank allocates and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, MeshError
from mmfsdp.planning.distributed_params import check_plain
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.planning.step_memory import whole_bytes
from mmfsdp.rehearsal.averaged_weights import Averages, EmaFn
from mmfsdp.rehearsal.explaining import explained
from mmfsdp.rehearsal.fake import (
    FewChunks,
    allocated_by_size,
    assumed_arrays,
    fake_tensors,
    plain_params,
    quiet,
    unseen_shapes,
    watched_resizes,
)
from mmfsdp.rehearsal.fake_copies import fake_batch, fake_model
from mmfsdp.rehearsal.optimizers import OptimizerFn, optimizer_of
from mmfsdp.rehearsal.recording.assuming import scalar
from mmfsdp.rehearsal.recording.autocasting import autocast_as_on
from mmfsdp.rehearsal.recording.convolutions import convolution_bytes
from mmfsdp.rehearsal.recording.device_operators import device_operators
from mmfsdp.rehearsal.recording.kernels import accelerator_scratch_bytes
from mmfsdp.rehearsal.recording.operator_costs import Costs
from mmfsdp.rehearsal.recording.operator_results import Values
from mmfsdp.rehearsal.recording.phases import Places
from mmfsdp.rehearsal.recording.recorder import Recorder
from mmfsdp.rehearsal.recording.sync_norms import sync_norms
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.step import LossFn, default_loss, run_step
from mmfsdp.rehearsal.timing.device_specs import UNKNOWN, Device, device_of
from mmfsdp.rehearsal.worlds import fake_world
from mmfsdp.runtime.guards import unwatched
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.torch_fsdp2.unreduced import gradients_of
from mmfsdp.sharding.apply import shard_in_place
from mmfsdp.sharding.device_mesh import build_mesh

__all__ = ["rehearse", "rehearse_once"]


def rehearse(
    plan: ShardPlan | ShardConfig | Mapping[str, Any] | None,
    model: nn.Module,
    batch: Any,
    *,
    mesh: int | tuple[int, int] | None = None,
    rank: int = 0,
    loss: LossFn | None = None,
    optimizer: str | OptimizerFn | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    device_type: str = "cuda",
    assume: float | None = None,
    ema: EmaFn | None = None,
    device: str | Device | None = None,
) -> Rehearsal:
    """Run one step of training without memory, devices and other ranks, and record what a rank allocates and sends.

    The model's own forward, backward, clipping and optimizer run under fake tensors, which have shapes and no values,
    with the plan applied in a world of its real size that sends nothing. What is recorded is the second step, because
    the first one makes the optimizer's state. Not collective; a process group that there is goes on unharmed. The model
    and the batch are not changed.

    Not included: what kernels allocate and free inside one operator, what an allocator rounds up, and the context of a
    device. For ``'cuda'``, attention, RMSNorm, dropout and autocast run as torch runs them on a GPU; the page on
    operators of the device lists all that is modelled.

    Args:
        plan: The plan, or a config from which `mmfsdp.plan` makes one.
        model: The model that the plan is for, on any device; ``meta`` is enough.
        batch: What one rank gets in a micro-batch, on any device: a mapping is passed to the model as keyword
            arguments, a tuple or list as positional ones. Tensors on ``meta`` are enough.
        mesh: With a config: the number of ranks, or a (replicate, shard) pair. Default: 1.
        rank: The rank to rehearse; shards of the last ones may be smaller.
        loss: ``(model, batch) -> loss``, a tensor of one element: what the training loop does before ``backward()``.
            Default: calls the model, and takes ``loss`` from its output, or the mean of the first tensor.
        optimizer: ``'adamw'``, ``'sgd-momentum'`` or another name that `mmfsdp.rehearsal.optimizer_from` knows, or a
            function from parameters to an optimizer. Default: the plan's, or ``'adamw'`` if it names none.
        max_norm: The norm to clip gradients to; default: no clipping.
        accumulate: Number of micro-batches in the step.
        device_type: The device to train on. On others than ``'cpu'`` torch's optimizers compute many tensors in one
            call, which takes more memory.
        assume: For a model that asks for values (``.item()``, masks as indices, ``nonzero()``): the share of elements
            that masks select, between 0 and 1. Other values that it asks for are true, or one. Default: it raises.
        ema: For averaged weights, updated after each optimizer step: a function from this rank's part of the model to
            an object with ``update_parameters(model)``, such as ``torch.optim.swa_utils.AveragedModel``.
        device: The GPU to train on, one of `mmfsdp.rehearsal.devices` or a `Device`: its architecture decides which
            kernel of attention torch prefers, and how large the workspaces of cuBLAS are. Default: a GPU from Ampere
            on without a preference, with workspaces of either size.

    Raises:
        RehearsalError: The model failed, or needs the values of tensors; names the module and the line.
        ConfigError: A setting is wrong, or the model cannot be copied.
        MmfsdpError: See `mmfsdp.plan`.
    """
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate is a number of micro-batches, at least 1, got {accumulate!r}.")
    if assume is not None and not (isinstance(assume, int | float) and 0 <= assume <= 1):
        raise ConfigError(f"assume is the share of elements that masks select, between 0 and 1, got {assume!r}.")
    if not isinstance(plan, ShardPlan):
        plan = make_plan(model, plan, 1 if mesh is None else mesh)
    elif mesh is not None:
        raise ConfigError("A plan has its mesh already. Drop mesh, or give a config instead of the plan.")
    check_plain(model)
    if not 0 <= rank < plan.mesh.world_size:
        raise MeshError(f"Rank {rank} is not in {plan.mesh}.")
    return _rehearsed(
        plan,
        model,
        batch,
        rank=rank,
        loss=loss,
        optimizer=optimizer,
        max_norm=max_norm,
        accumulate=accumulate,
        device_type=device_type,
        assume=assume,
        ema=ema,
        device=device,
    )


def rehearse_once(plan: ShardPlan, model: nn.Module, batch: Any, **options: Any) -> Rehearsal:
    """Run one step instead of two: the optimizer makes its state from gradients of zeros.

    Takes little more than half the time of `rehearse`, and records the same, unless the model or averaged weights do
    something else in their first step. If a parameter gets no gradient, and so has no state, two steps run after all.

    Args:
        plan: The plan.
        model: See `rehearse`.
        batch: See `rehearse`.
        **options: The other arguments of `rehearse` but ``mesh``, with the same defaults.
    """
    settings = {name: value for name, value in (rehearse.__kwdefaults__ or {}).items() if name != "mesh"} | options
    try:
        return _rehearsed(plan, model, batch, **settings, once=True)
    except _IdleError:
        return _rehearsed(plan, model, batch, **settings)


class _IdleError(Exception):
    """A parameter that may be trained gets no gradient."""


def _rehearsed(
    plan: ShardPlan,
    model: nn.Module,
    batch: Any,
    *,
    rank: int,
    loss: LossFn | None,
    optimizer: str | OptimizerFn | None,
    max_norm: float | None,
    accumulate: int,
    device_type: str,
    assume: float | None,
    ema: EmaFn | None,
    device: str | Device | None,
    once: bool = False,
) -> Rehearsal:
    known = None if device is None else device_of(device)
    capability = None
    if known is not None and known.capability != UNKNOWN:
        capability = known.capability
        if device_type != "cuda":
            raise ConfigError(f"{known.name} is a GPU, but device_type is {device_type!r}. Drop one of them.")
    places = Places()
    with fake_world(plan.mesh.world_size, rank), ExitStack() as stack:
        ranks = build_mesh(plan.mesh, "cpu")
        mode = stack.enter_context(fake_tensors())
        stack.enter_context(unwatched())
        stack.enter_context(quiet())
        stack.enter_context(plain_params())
        if device_type != "cpu":
            stack.enter_context(sync_norms())  # before the model is sharded, which binds its forwards
        stack.enter_context(allocated_by_size())
        if plan.compiled_already:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with FewChunks():
            state = shard_in_place(fake_model(model), plan.model_copy(update={"compile": None}), ranks)
        module = state.module  # the state alone would not keep it
        offloads = whole = None
        if plan.cpu_offload and plan.engine != "fsdp1" and device_type != "cpu":
            offloads = {unit.fqn: plan.unit_param_bytes(unit, rank) for unit in plan.units}
            if plan.mesh.shard == 1:
                whole = {unit.fqn: whole_bytes(unit) for unit in plan.units if unit.params}
        made = optimizer_of(optimizer, module, plan, "cpu" if offloads else device_type)
        batches = [fake_batch(batch) for _ in range(accumulate)]
        on_cpu = device_type == "cpu"
        if assume is not None:
            stack.enter_context(assumed_arrays(scalar))
        if not on_cpu:
            stack.enter_context(device_operators(mode, capability))
            stack.enter_context(autocast_as_on(device_type))
        costs = Costs([unit.fqn for unit in plan.units], is_accelerator=not on_cpu)
        values = Values(places, assume, keeps=not state.is_fsdp1)
        scratch = convolution_bytes if on_cpu else accelerator_scratch_bytes
        recorder = Recorder(mode, places, scratch, costs, values, offloads, whole)
        with recorder, watched_resizes(recorder.resized), unseen_shapes(recorder.paused):
            _adopt(recorder, state, batches)
            with places.watch(state, lambda group: _adopt_gradients(recorder, gradients_of(group))):
                averages = None
                if ema is not None:
                    begin, places.phase = recorder.moment, "ema"
                    averages = Averages(ema, module)
                    recorder.adopt_new(begin, "ema")
                if once:
                    _gather_once(module)
                    _make_state(module, made)
                    if averages is not None:
                        averages.update()
                idle: list[torch.Tensor] = []
                # The first step makes the optimizer's state, and what FSDP keeps from step to step.
                for micro_batches in (batches,) if once else (batches[:1], batches):
                    recorder.restart()
                    with explained(places, plan, module):
                        run_step(
                            _beginning(recorder, state, idle),
                            module,
                            micro_batches,
                            loss or default_loss,
                            made,
                            max_norm,
                            None if averages is None else averages.update,
                        )
                    recorder.adopt_new(dict(recorder.phases).get("ema", recorder.moment + 1) - 1, "ema")
                    # FSDP2 may replace shards with padded ones when the model first runs.
                    _adopt_model(recorder, module)
                    recorder.adopt(_state_of(made), "optimizer state")
                    if not on_cpu and offloads is None:
                        recorder.leave_out(_counts_on_host(made))
    if once and idle:
        raise _IdleError
    return Rehearsal(
        rank=rank,
        mesh=str(plan.mesh),
        engine=plan.engine,
        device_type=device_type,
        allocations=recorder.finish(),
        on_cpu=tuple(recorder.on_cpu),
        collectives=tuple(recorder.collectives),
        phases=tuple(recorder.phases),
        last=recorder.moment,
        plan=plan,
        operators=tuple(recorder.operators),
        calls=costs.calls,
        device=known,
    )


def _gather_once(module: nn.Module) -> None:
    """Let FSDP2 make what it keeps from step to step."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            part.reshard()


def _make_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state."""
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def _adopt(recorder: Recorder, state: ShardedModel, batches: list[Any]) -> None:
    """Record what is there before the step."""
    _adopt_model(recorder, state.module)
    recorder.adopt((leaf for leaf in torch.utils._pytree.tree_leaves(batches) if torch.is_tensor(leaf)), "input")


def _adopt_model(recorder: Recorder, model: nn.Module) -> None:
    for name, owner in model.named_modules():
        recorder.adopt(owner.parameters(recurse=False), "parameter", name)
        recorder.offload(owner.parameters(recurse=False))
        recorder.adopt(owner.buffers(recurse=False), "buffer", name)


def _adopt_gradients(recorder: Recorder, gradients: Iterable[torch.Tensor]) -> None:
    found = [*gradients]
    recorder.adopt(found, "gradient")
    recorder.offload(found)


def _beginning(recorder: Recorder, state: ShardedModel, idle: list[torch.Tensor]) -> Callable[[str], None]:
    """Return what begins a phase; when backward has ended, its gradients are known.

    Parameters that the optimizer finds without a gradient are added to ``idle``.
    """

    def begin(phase: str) -> None:
        params = [*state.module.parameters()]
        whole = (param.grad for param in params if param.grad is not None)
        if phase == "optimizer":
            idle.extend(param for param in params if param.requires_grad and param.grad is None)
        _adopt_gradients(recorder, chain(whole, *(gradients_of(group) for group in state.groups)))
        recorder.begin(phase)

    return begin


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for held in optimizer.state.values():
        yield from (value for value in held.values() if isinstance(value, torch.Tensor))


def _counts_on_host(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the counts of steps that torch's optimizers keep in CPU memory: all but fused and capturable ones."""
    for group in optimizer.param_groups:
        if not group.get("fused") and not group.get("capturable"):
            held = (optimizer.state.get(param, {}).get("step") for param in group["params"])
            yield from (count for count in held if isinstance(count, torch.Tensor))
