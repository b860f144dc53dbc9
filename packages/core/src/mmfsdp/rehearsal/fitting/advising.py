"""`advise()`: rehearses a step, and finds the changes of its settings that lower its peak most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError, MmfsdpError
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.allocator.accounting import highest
from mmfsdp.rehearsal.fitting.candidates import plain_settings
from mmfsdp.rehearsal.fitting.changes import Change, changes_of
from mmfsdp.rehearsal.fitting.dividing import micro_batch, samples_of
from mmfsdp.rehearsal.fitting.extrapolating import combined, highest_by_point
from mmfsdp.rehearsal.fitting.shortening import short_models, stacks_of
from mmfsdp.rehearsal.rehearsing import rehearse_once, rehearse_step
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.running.averaged_weights import EmaFn
from mmfsdp.rehearsal.running.fake_run import Target
from mmfsdp.rehearsal.running.optimizers import OptimizerFn, make_optimizer
from mmfsdp.rehearsal.running.step import LossFn
from mmfsdp.rehearsal.running.training_step import TrainingStep
from mmfsdp.rehearsal.savings import Saving
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import human_seconds

__all__ = ["advise"]

_TRIED = 4  # changes that are rehearsed; each takes about a fifth of the time of the step of a model with 32 layers
_WORTHWHILE = 0.01  # of the peak


def advise(
    config: ShardConfig | Mapping[str, Any] | None,
    model: nn.Module,
    batch: Any,
    *,
    mesh: int | tuple[int, int] = 1,
    policy: Any = None,
    count: int = 3,
    rank: int = 0,
    loss: LossFn | None = None,
    optimizer: str | OptimizerFn | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    device_type: str | None = None,
    assume: float | None = None,
    ema: EmaFn | None = None,
    device: str | Device | None = None,
    batch_dim: int = 0,
) -> Rehearsal:
    """Rehearse a step as `rehearse` does, and find the changes of its settings that lower its peak most.

    Only changes that concern what is held at the peak are tried: activation checkpointing, sharding over more ranks,
    freeing units after forward, large embeddings and heads or parts of blocks as units, precision, prefetching, smaller
    micro-batches, gradients reduced with each of them, and shards in CPU memory if these are most of the peak; as that
    makes steps much longer, the saving says how long they take on the device, before and after. At most four are
    rehearsed, with copies of the model that have fewer layers where these tell the step's own peak to the byte, with
    the whole model otherwise. What a fused optimizer would save follows from the record. Not collective; see
    `rehearse`.

    Args:
        config: The settings. A plan cannot be changed by its settings, so it is not taken.
        model: See `rehearse`.
        batch: See `rehearse`.
        mesh: The number of ranks, or a (replicate, shard) pair.
        policy: A wrapping policy in place of ``config.wrap``; units are then not varied.
        count: How many changes to return at most.
        rank: See `rehearse`.
        loss: See `rehearse`.
        optimizer: See `rehearse`.
        max_norm: See `rehearse`.
        accumulate: See `rehearse`.
        device_type: See `rehearse`.
        assume: See `rehearse`.
        ema: See `rehearse`.
        device: See `rehearse`.
        batch_dim: The dimension of the batch's tensors that counts samples, for micro-batches.

    Returns:
        The rehearsal, with `Rehearsal.savings`: the largest first, each at least a hundredth of the peak.

    Raises:
        RehearsalError: The step failed, or needs the values of tensors. A change that fails is left out.
        ConfigError: A setting is wrong, or a plan was given.
        ShardStateError: This process is in a process group.
    """
    if isinstance(config, ShardPlan):
        raise ConfigError("advise() changes settings, and a plan has none. Give the config that the plan was made of.")
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"count is a number of changes, at least 1, got {count!r}.")
    given = plain_settings(config)
    training = TrainingStep(
        batch, loss=loss, optimizer=optimizer, max_norm=max_norm, accumulate=accumulate, ema=ema, assume=assume
    )
    target = Target(make_plan(model, given, mesh, policy=policy), rank, device, device_type)
    step = rehearse_step(model, training, target)
    changes = changes_of(step, given, samples_of(batch, batch_dim), wraps=policy is None)[:_TRIED]
    peaks = _Peaks(model, training, target, mesh, policy, batch_dim)
    if changes:
        peaks.check(given, step)
    found = [
        *_fused(step, optimizer),
        *(saving for change in changes for saving in _rehearsed(step, given, change, peaks)),
    ]
    found = [saving for saving in found if saving.nbytes >= _WORTHWHILE * step.peak.nbytes]
    return replace(step, savings=tuple(sorted(found, key=lambda saving: -saving.nbytes)[:count]))


@dataclass(frozen=True)
class _Changed:
    """A step with other settings: the bytes at its peak, and the weights and rehearsals that it follows from."""

    nbytes: int
    steps: Sequence[tuple[float, Rehearsal]]

    @property
    def seconds(self) -> float:
        return sum(weight * step.time().seconds for weight, step in self.steps)


class _Peaks:
    """Peaks of steps with other settings."""

    def __init__(
        self,
        model: nn.Module,
        training: TrainingStep,
        target: Target,
        mesh: int | tuple[int, int],
        policy: Any,
        batch_dim: int,
    ) -> None:
        self._model, self._training, self._target = model, training, target
        self.accumulate = training.accumulate
        self._mesh, self._policy, self._batch_dim = mesh, policy, batch_dim
        self._stacks = stacks_of(model)
        self._short = [*short_models(model, self._stacks)] if self._stacks else []

    def check(self, given: Mapping[str, Any], step: Rehearsal) -> None:
        """Use the whole model from now on if short copies do not tell the peak of the step, as it was rehearsed."""
        try:
            if self._short and self.of(given).nbytes != step.peak.nbytes:
                self._short = []
        except MmfsdpError:  # the model depends on how many layers it has
            self._short = []

    def of(self, settings: Mapping[str, Any], divides: int = 1, *, reduces: bool = False) -> _Changed:
        """Return the peak of a step, and its rehearsals."""
        training = replace(
            self._training,
            batch=micro_batch(self._training.batch, divides, self._batch_dim),
            accumulate=self._training.accumulate * divides,
            reduce_each=reduces,
        )
        if not self._short:
            step = rehearse_step(self._model, training, self._planned(self._model, settings))
            return _Changed(step.peak.nbytes, [(1.0, step)])
        steps, parts = [], []
        for short, weight, depths in self._short:
            found = {stack.fqn: (stack.first, depths[stack.fqn]) for stack in self._stacks}
            step = rehearse_once(short, training, self._planned(short, settings))
            steps.append((weight, step))
            parts.append((weight, highest_by_point(step, found)))
        return _Changed(combined(parts).nbytes, steps)

    def _planned(self, model: nn.Module, settings: Mapping[str, Any]) -> Target:
        return replace(self._target, plan=make_plan(model, settings, self._mesh, policy=self._policy))


def _rehearsed(step: Rehearsal, given: Mapping[str, Any], change: Change, peaks: _Peaks) -> Iterator[Saving]:
    try:
        changed = peaks.of({**given, **change.settings}, change.divides, reduces=change.reduces)
    except MmfsdpError:  # such as activation checkpointing of a model that does not bear it
        return
    what = change.what
    if "cpu_offload" in change.settings:
        now = step.time()
        what += (
            f", with steps of {human_seconds(changed.seconds)} in place of {human_seconds(now.seconds)} on {now.device}"
        )
    elsewhere = ""
    if change.divides > 1:
        elsewhere = f"accumulate={peaks.accumulate * change.divides}, or the same in the training loop"
    elif change.reduces:
        elsewhere = "no mmfsdp.no_sync() in the training loop (reduce_each=True of rehearse(), or --reduce-each)"
    yield Saving(step.peak.nbytes - changed.nbytes, what, change.settings, elsewhere)


def _fused(step: Rehearsal, optimizer: str | OptimizerFn | None) -> Iterator[Saving]:
    """Yield the saving of the optimizer's fused kernel, which computes without temporaries."""
    begin = next((moment for name, moment in step.phases if name == "optimizer"), None)
    if optimizer is None and step.plan.optimizer is not None:
        return
    if step.peak.phase != "optimizer" or begin is None or not _can_fuse(optimizer or "adamw"):
        return
    left = [item for item in step.allocations if item.kind != "optimizer temporary" or item.begin < begin]
    saved = step.peak.nbytes - highest(left)[0]
    yield Saving(
        saved,
        "the fused kernel of the optimizer",
        elsewhere="fused=True, an argument of the optimizer",
        source="derived",
    )


def _can_fuse(optimizer: str | OptimizerFn) -> bool:
    try:
        made = make_optimizer(optimizer, [nn.Parameter(torch.zeros(1))], "cpu")
    except Exception:  # a function may make an optimizer for one model only
        return False
    return any("fused" in group and not group["fused"] for group in made.param_groups)
