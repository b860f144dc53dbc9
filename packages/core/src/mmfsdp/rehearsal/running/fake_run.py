"""Runs a step on fake tensors in a fake world, with the operators of its device, and records it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from mmfsdp.errors import RehearsalError
from mmfsdp.planning.memory.steps import whole_bytes
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.fakes.fake import (
    allocated_by_size,
    assumed_arrays,
    fake_tensors,
    is_fake,
    plain_params,
    quiet,
    unseen_shapes,
    watched_resizes,
)
from mmfsdp.rehearsal.fakes.fake_copies import fake_batch, fake_model
from mmfsdp.rehearsal.fakes.worlds import fake_world
from mmfsdp.rehearsal.recording.assuming import scalar
from mmfsdp.rehearsal.recording.autocasting import autocast_as_on
from mmfsdp.rehearsal.recording.compiled_graphs import compiled_graphs
from mmfsdp.rehearsal.recording.device_operators import device_operators
from mmfsdp.rehearsal.recording.kernels.cpu_kernels import cpu_scratch_bytes
from mmfsdp.rehearsal.recording.kernels.scratch import accelerator_scratch_bytes
from mmfsdp.rehearsal.recording.kernels.sync_norms import sync_norms
from mmfsdp.rehearsal.recording.known_results import KnownResults, Recipes
from mmfsdp.rehearsal.recording.operator_costs import Costs
from mmfsdp.rehearsal.recording.operator_results import Values
from mmfsdp.rehearsal.recording.phases import StepPosition
from mmfsdp.rehearsal.recording.recorder import Recorder
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.running.averaged_weights import Averages
from mmfsdp.rehearsal.running.explaining import buffers_advice, explained, with_cast_buffers
from mmfsdp.rehearsal.running.optimizers import optimizer_of
from mmfsdp.rehearsal.running.step import call_with, default_loss, run_forward, run_step
from mmfsdp.rehearsal.running.training_step import TrainingStep
from mmfsdp.rehearsal.timing.device_names import target_of
from mmfsdp.rehearsal.timing.device_specs import UNKNOWN, Device
from mmfsdp.runtime.refusals.guards import unwatched
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.runtime.torch_fsdp2.unreduced import gradients_of
from mmfsdp.sharding.apply import shard_in_place
from mmfsdp.sharding.device_mesh import build_mesh

__all__ = ["IdleError", "Target", "run_fake"]


class IdleError(Exception):
    """A parameter that may be trained gets no gradient."""


@dataclass(frozen=True)
class Target:
    """The rank that takes a step, and its device; see `mmfsdp.rehearse`."""

    plan: ShardPlan
    rank: int = 0
    device: str | Device | None = None
    device_type: str | None = None


def run_fake(
    model: nn.Module, step: TrainingStep, target: Target, *, once: bool = False, recipes: Recipes | None = None
) -> Rehearsal:
    """Run a step, by default the second of two, and return its record.

    A step that fails where tensors of several dtypes meet runs again with buffers in the dtype of computation: only if
    that helps, the error says so.

    Args:
        model: The model that the plan is for.
        step: The step.
        target: The plan, the rank and the device.
        once: Run one step, for which the optimizer makes its state from gradients of zeros. It does so, too, for a step
            that does not train.
        recipes: What other rehearsals for the same device know of operators, and learn from this one.

    Raises:
        IdleError: With ``once``, a parameter has no gradient, so the state that was made for it is not there.
        RehearsalError: The model failed, or needs the values of tensors.
        ConfigError: There is no such device, or it is of another type.
    """
    try:
        return _run(model, step, target, once, recipes)
    except RehearsalError as error:
        cast = with_cast_buffers(error.__cause__, target.plan, model)
        if cast is None:
            raise
        try:
            _run(model, step, replace(target, plan=cast), once, recipes)
        except Exception:  # buffers are not why
            raise error from error.__cause__
        raise RehearsalError(f"{error.message}{buffers_advice(cast, model)}", **error.context) from error.__cause__


def _run(model: nn.Module, step: TrainingStep, target: Target, once: bool, recipes: Recipes | None) -> Rehearsal:
    plan, rank, train = target.plan, target.rank, step.train
    known, device_type = target_of(target.device, target.device_type)
    capability = None if known is None or known.capability == UNKNOWN else known.capability
    position = StepPosition()
    with fake_world(plan.mesh.world_size, rank), ExitStack() as stack:
        ranks = build_mesh(plan.mesh, "cpu")
        mode = stack.enter_context(fake_tensors())
        stack.enter_context(unwatched())
        stack.enter_context(quiet())
        stack.enter_context(plain_params())
        if device_type != "cpu":
            stack.enter_context(sync_norms())  # before the model is sharded, which binds its forwards
        stack.enter_context(allocated_by_size())
        results = KnownResults(mode, recipes)
        with results:
            copied = fake_model(model)
        graphs = stack.enter_context(compiled_graphs(plan, copied))
        with results, _FewChunks():
            state = shard_in_place(copied, plan if graphs else plan.model_copy(update={"compile": None}), ranks)
        module = state.module  # the state alone would not keep it
        offloads = whole = None
        if plan.cpu_offload and plan.engine != "fsdp1" and device_type != "cpu":
            offloads = {unit.fqn: plan.unit_param_bytes(unit, rank) for unit in plan.units}
            if plan.mesh.shard == 1:
                whole = {unit.fqn: whole_bytes(unit) for unit in plan.units if unit.params}
        made = None
        if train or step.optimizer is not None:
            made = optimizer_of(step.optimizer, module, plan, "cpu" if offloads else device_type)
        batches = [fake_batch(step.batch) for _ in range(step.accumulate)]
        on_cpu = device_type == "cpu"
        if step.assume is not None:
            stack.enter_context(assumed_arrays(scalar))
        if not on_cpu:
            stack.enter_context(device_operators(mode, capability))
            stack.enter_context(autocast_as_on(device_type))
        costs = Costs([unit.fqn for unit in plan.units], is_accelerator=not on_cpu)
        values = Values(position, results, step.assume, keeps=not state.is_fsdp1)
        scratch = cpu_scratch_bytes if on_cpu else functools.partial(accelerator_scratch_bytes, capability)
        recorder = Recorder(mode, position, values, scratch, costs, offloads, whole, state.is_fsdp1)
        if graphs is not None:
            graphs.watch(module, recorder)
        with recorder, watched_resizes(recorder.resized), unseen_shapes(recorder.paused):
            _adopt(recorder, state, batches)
            with position.watch(state, lambda group: _adopt_gradients(recorder, gradients_of(group))):
                averages = None
                if step.ema is not None:
                    begin, position.phase = recorder.moment, "ema"
                    averages = Averages(step.ema, module)
                    recorder.adopt_new(begin, "ema")
                if made is not None and (once or not train):
                    _gather_once(module)
                    _make_state(module, made)
                    if averages is not None:
                        averages.update()
                if not train:
                    module.eval()
                idle: list[torch.Tensor] = []
                # The first step makes the optimizer's state, and what FSDP keeps from step to step.
                for micro_batches in (batches,) if once else (batches[:1], batches):
                    recorder.restart()
                    begins = _beginning(recorder, state, idle)
                    with explained(position, step.batch):
                        if made is None or not train:
                            run_forward(begins, module, micro_batches, step.loss or call_with)
                        else:
                            average = None if averages is None else averages.update
                            given = module, micro_batches, step.loss or default_loss, made, step.max_norm, average
                            run_step(begins, *given, reduce_each=step.reduce_each)
                    recorder.adopt_new(dict(recorder.phases).get("ema", recorder.moment + 1) - 1, "ema")
                    # FSDP2 may replace shards with padded ones when the model first runs.
                    _adopt_model(recorder, module)
                    if made is not None:
                        recorder.adopt(_state_of(made), "optimizer state")
                        if not on_cpu and offloads is None:
                            recorder.leave_out(_counts_on_host(made))
    if once and idle:
        raise IdleError
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
    """Let FSDP2 allocate the buffers that it keeps from step to step."""
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
    """Record a model's parameters and buffers as such."""
    for name, owner in model.named_modules():
        recorder.adopt(owner.parameters(recurse=False), "parameter", name)
        recorder.offload(owner.parameters(recurse=False))
        recorder.adopt(owner.buffers(recurse=False), "buffer", name)


def _adopt_gradients(recorder: Recorder, gradients: Iterable[torch.Tensor]) -> None:
    """Record tensors as gradients of parameters."""
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
    """Yield the tensors that an optimizer keeps from step to step."""
    for held in optimizer.state.values():
        yield from (value for value in held.values() if isinstance(value, torch.Tensor))


def _counts_on_host(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the counts of steps that torch's optimizers keep in CPU memory: all but fused and capturable ones."""
    for group in optimizer.param_groups:
        if not group.get("fused") and not group.get("capturable"):
            held = (optimizer.state.get(param, {}).get("step") for param in group["params"])
            yield from (count for count in held if isinstance(count, torch.Tensor))


class _FewChunks(TorchFunctionMode):
    """Makes ``torch.chunk`` return one fake view for all chunks of equal size.

    ``fully_shard`` divides every parameter into as many chunks as there are ranks and keeps one. For a 7 B model on
    1,024 ranks, views for all of them take 18 of 25 seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.chunk or len(args) < 2 or not is_fake(args[0]):
            return func(*args, **kwargs)
        tensor, count = args[:2]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        size = tensor.size(dim)
        step = -(-size // count)
        whole, rest = divmod(size, step) if step else (0, 0)
        if whole + bool(rest) < 3:
            return func(*args, **kwargs)
        chunks = [tensor.narrow(dim, 0, step)] * whole
        if rest:
            chunks.append(tensor.narrow(dim, whole * step, rest))
        return (*chunks, *[tensor.narrow(dim, size, 0)] * (count - len(chunks)))
