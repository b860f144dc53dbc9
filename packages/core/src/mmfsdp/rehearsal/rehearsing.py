"""`rehearse()`: runs a step of training on fake tensors in a fake world, and records what one rank does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn

from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, MeshError, PlanError
from mmfsdp.planning.distributed_params import divided_tensors
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.recording.known_results import Recipes
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.running.averaged_weights import EmaFn
from mmfsdp.rehearsal.running.fake_run import IdleError, Target, run_fake
from mmfsdp.rehearsal.running.optimizers import OptimizerFn
from mmfsdp.rehearsal.running.step import LossFn
from mmfsdp.rehearsal.running.training_step import TrainingStep
from mmfsdp.rehearsal.timing.device_specs import Device

__all__ = ["rehearse", "rehearse_once", "rehearse_step"]


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
    device_type: str | None = None,
    assume: float | None = None,
    ema: EmaFn | None = None,
    device: str | Device | None = None,
    reduce_each: bool = False,
    train: bool = True,
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
        device_type: The type of the device to train on. On others than ``'cpu'`` torch's optimizers compute many
            tensors in one call, which takes more memory. Default: the type of ``device``, or ``'cuda'``.
        assume: For a model that asks for values (``.item()``, masks as indices, ``nonzero()``): the share of elements
            that masks select, between 0 and 1. Other values that it asks for are true, or one. Default: it raises.
        ema: For averaged weights, updated after each optimizer step: a function from this rank's part of the model to
            an object with ``update_parameters(model)``, such as ``torch.optim.swa_utils.AveragedModel``.
        device: The device to train on: one of `mmfsdp.rehearsal.devices`, with the network between nodes behind an
            ``@`` if it is not the usual one (``'h100@roce-200'``), the file of a calibration, or a `Device`. Its
            architecture decides which kernel of attention torch prefers, and how large the workspaces of cuBLAS are;
            `Rehearsal.time` is the time on it. Default: a GPU from Ampere on without a preference, with
            workspaces of either size.
        reduce_each: Reduce gradients with every micro-batch, as a loop without `mmfsdp.no_sync` does: more is sent,
            and no whole gradients wait for the last micro-batch.
        train: False for a step of evaluation or generation: forward alone, in evaluation mode and without gradients.
            ``loss`` is then whatever the loop does with the model and the batch, such as generating tokens with a
            cache; its result does not matter. The state of a given ``optimizer`` is held, as in evaluations between
            steps of training; the state of the plan's own optimizer is not.

    Raises:
        RehearsalError: The model failed, or needs the values of tensors; names the module and the line.
        ConfigError: A setting is wrong, or the model cannot be copied.
        MmfsdpError: See `mmfsdp.plan`.
    """
    step = TrainingStep(
        batch,
        loss=loss,
        optimizer=optimizer,
        max_norm=max_norm,
        accumulate=accumulate,
        ema=ema,
        assume=assume,
        reduce_each=reduce_each,
        train=train,
    )
    if not isinstance(plan, ShardPlan):
        plan = make_plan(model, plan, 1 if mesh is None else mesh)
    elif mesh is not None:
        raise ConfigError("A plan has its mesh already. Drop mesh, or give a config instead of the plan.")
    return rehearse_step(model, step, Target(plan, rank, device, device_type))


def rehearse_step(model: nn.Module, step: TrainingStep, target: Target) -> Rehearsal:
    """Rehearse a step as `rehearse` does, by its description."""
    if divided := next(divided_tensors(model), None):
        raise PlanError(
            f"{divided[0]!r} is divided by tensor parallelism, and such models cannot be rehearsed yet. Their plan has "
            "exact bytes: mmfsdp.estimate_memory(mmfsdp.plan(model, config, mesh)).",
            fqn=divided[0],
        )
    if target.plan.parallel:
        raise PlanError(
            f"The plan divides {target.plan.parallel[0].fqn!r} by a rule of parallel, and such models cannot be "
            "rehearsed yet. The plan has exact bytes: mmfsdp.estimate_memory(plan).",
            fqn=target.plan.parallel[0].fqn,
        )
    if not target.plan.mesh.is_simple:
        raise MeshError(
            f"A step on {target.plan.mesh} cannot be rehearsed yet. But for attention over ranks, "
            f"{{'replicate': {target.plan.mesh.replicate}, 'shard': {target.plan.mesh.shard_ranks}}} takes the same "
            "memory, with the part of a batch that a rank has."
        )
    if not 0 <= target.rank < target.plan.mesh.world_size:
        raise MeshError(f"Rank {target.rank} is not in {target.plan.mesh}.")
    return run_fake(model, step, target)


def rehearse_once(model: nn.Module, step: TrainingStep, target: Target, *, recipes: Recipes | None = None) -> Rehearsal:
    """Run one step instead of two: the optimizer makes its state from gradients of zeros.

    Takes little more than half the time of `rehearse`, and records the same, unless the model or averaged weights do
    something else in their first step. If a parameter gets no gradient, and so has no state, two steps run after all.

    Args:
        model: See `rehearse`.
        step: The step.
        target: The plan, the rank and the device.
        recipes: What other rehearsals for the same device know of operators; this one uses it, and adds to it.
    """
    try:
        return run_fake(model, step, target, recipes=recipes, once=True)
    except IdleError:
        return run_fake(model, step, target, recipes=recipes)
