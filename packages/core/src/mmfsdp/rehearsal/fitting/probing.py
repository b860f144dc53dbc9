"""Estimates the memory and the time of a step with chosen settings, from rehearsals of short copies of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn as nn

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.errors import MmfsdpError
from mmfsdp.planning.memory.steps import compute_itemsize
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.allocator.accounting import highest
from mmfsdp.rehearsal.fitting.candidates import Choice
from mmfsdp.rehearsal.fitting.computing import Computing, computing_of, summed
from mmfsdp.rehearsal.fitting.dividing import micro_batch
from mmfsdp.rehearsal.fitting.extrapolating import ACTIVATIONS, Highest, combined, highest_by_point
from mmfsdp.rehearsal.fitting.shortening import Stack, short_models, stacks_of
from mmfsdp.rehearsal.recording.known_results import Recipes
from mmfsdp.rehearsal.rehearsing import rehearse_once, rehearse_step
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.running.fake_run import Target
from mmfsdp.rehearsal.running.training_step import TrainingStep
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import StepTime, time_of

__all__ = ["Estimate", "Prober"]

_REHEARSED = 2  # micro-batches; those after the second are as the second


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory and the time of a step of one rank."""

    peak: Highest
    """The highest moment of the step."""
    nbytes: int
    """Bytes that the step takes of the device at most; see `Rehearsal.device_bytes`."""
    activations: float
    """The most bytes of the kinds that do not depend on how parameters are sharded."""
    forward_activations: float
    """The same while the last forward runs."""
    kept_activations: float
    """The most bytes of these kinds while the last forward runs, when every unit has begun its own."""
    carried: float
    """Bytes of whole gradients that earlier micro-batches leave, and that are all held while the last forward runs."""
    reduced: float
    """Bytes of whole gradients that units reduce, as micro-batches add them up."""
    state: float
    """Bytes of optimizer state per byte of parameters."""
    seconds: float
    """The time of the step."""
    computing: Computing
    """What forward and backward compute."""
    useful: float
    """Seconds that the model's FLOPs take at the device's peak, without recomputed operators."""
    steps: tuple[tuple[float, Rehearsal, float], ...] = field(repr=False)
    """The rehearsed steps, each with its weight and its seconds."""

    @property
    def is_whole(self) -> bool:
        """Whether the whole model was rehearsed."""
        return len(self.steps) == 1


class Prober:
    """Rehearses a model with different settings.

    Args:
        model: The model, on any device.
        step: The step, with all that one rank gets in it as its batch.
        ranks: Number of ranks.
        device: The device to train on.
        policy: A wrapping policy in place of the settings' one.
        batch_dim: The dimension of the batch's tensors that counts samples.

    Attributes:
        stacks: The stacks of layers that short copies of the model shorten.
        count: Rehearsals so far.
    """

    def __init__(
        self,
        model: nn.Module,
        step: TrainingStep,
        ranks: int,
        device: Device,
        policy: Any = None,
        batch_dim: int = 0,
    ) -> None:
        self.model, self.ranks, self.device = model, ranks, device
        self.count = 0
        self._step, self._policy, self._batch_dim = step, policy, batch_dim
        self.stacks: tuple[Stack, ...] = stacks_of(model)
        self._short = [*short_models(model, self.stacks)] if self.stacks else []
        self._known: dict[str, Estimate] = {}
        self._plans: dict[str, ShardPlan] = {}
        self._recipes: Recipes = {}

    def plan(self, choice: Choice) -> ShardPlan:
        """Return the plan of the whole model, or one with equal units."""
        if choice.plan_key not in self._plans:
            self._plans[choice.plan_key] = self.exact_plan(choice)
        return self._plans[choice.plan_key]

    def exact_plan(self, choice: Choice) -> ShardPlan:
        """Return the plan of the whole model."""
        return self._planned(self.model, choice)

    def _planned(self, model: nn.Module, choice: Choice) -> ShardPlan:
        return make_plan(model, choice.settings, self.ranks, policy=self._policy)

    def estimate(self, choice: Choice) -> Estimate:
        """Return what a step needs, from short copies if the model has them."""
        if choice.key not in self._known:
            try:
                self._known[choice.key] = self._estimated(choice)
            except MmfsdpError:
                if not self._short:
                    raise
                self.distrust()  # the model depends on how many layers it has
                return self.estimate(choice)
        return self._known[choice.key]

    def knows(self, choice: Choice) -> bool:
        """Return whether a step was estimated."""
        return choice.key in self._known

    def distrust(self) -> None:
        """Rehearse the whole model from now on, because short copies mislead."""
        self.stacks, self._short = (), []
        self._known = {key: estimate for key, estimate in self._known.items() if estimate.is_whole}

    def whole(self, choice: Choice) -> Estimate:
        """Return what a step needs, from a rehearsal of the whole model with two micro-batches at most."""
        known = self._known.get(choice.key)
        if known is None or not known.is_whole:
            known = self._known[choice.key] = self._from([(1.0, self._run(self.model, choice), {})], choice)
        return known

    def _estimated(self, choice: Choice) -> Estimate:
        if not self._short:
            return self.whole(choice)
        parts = []
        for short, weight, depths in self._short:
            found = {stack.fqn: (stack.first, depths[stack.fqn]) for stack in self.stacks}
            parts.append((weight, self._run(short, choice), found))
        return self._from(parts, choice)

    def _from(
        self, parts: Sequence[tuple[float, Rehearsal, Mapping[str, tuple[int, int]]]], choice: Choice
    ) -> Estimate:
        peak = combined([(weight, highest_by_point(step, depths)) for weight, step, depths in parts])
        points = [(weight, highest_by_point(step, depths, ACTIVATIONS)) for weight, step, depths in parts]
        activations = combined(points)
        last = min(choice.accumulate, _REHEARSED) - 1  # each micro-batch has two phases
        in_forward = combined(
            [(weight, {key: value for key, value in found.items() if key[0] == 2 * last}) for weight, found in points]
        )
        times = [
            (weight, time_of(step.operators, step.collectives, self.device, bounds=False)) for weight, step, _ in parts
        ]
        more = max(choice.accumulate - _REHEARSED, 0)  # micro-batches that were not rehearsed

        def total(value: Callable[[Rehearsal], float]) -> float:
            return sum(weight * value(step) for weight, step, _ in parts)

        def timed(value: Callable[[StepTime], float]) -> float:
            return sum(weight * value(time) for weight, time in times)

        inputs = more * total(lambda step: step.static.get("input", 0)) / _REHEARSED
        if more:
            counts = dict(peak.by_kind)
            counts["input"] = counts.get("input", 0) + round(inputs)
            peak = replace(peak, by_kind=counts)
        needed = total(_needed) + inputs
        times_more = choice.accumulate / min(choice.accumulate, _REHEARSED)
        return Estimate(
            peak=peak,
            nbytes=max(round(needed), peak.nbytes),
            activations=activations.nbytes + inputs,
            forward_activations=in_forward.nbytes + inputs,
            kept_activations=total(lambda step: _kept_bytes(step, 2 * last)) + inputs,
            carried=total(lambda step: _carried_bytes(step, 2 * last)) if last and not choice.reduces else 0.0,
            reduced=total(_reduced_bytes),
            state=total(lambda step: step.static.get("optimizer state", 0))
            / max(total(lambda step: step.static.get("parameter", 0)), 1),
            seconds=timed(lambda time: time.seconds) + more * timed(_first_micro_batch),
            computing=summed((weight * times_more, computing_of(step, self.device)) for weight, step, _ in parts),
            useful=times_more * timed(lambda time: time.model_utilization * time.seconds),
            steps=tuple(
                (weight, step, time.seconds) for (weight, step, _), (_, time) in zip(parts, times, strict=True)
            ),
        )

    def _run(self, model: nn.Module, choice: Choice) -> Rehearsal:
        self.count += 1
        target = Target(self._planned(model, choice), device=self.device)
        step = replace(
            self._step,
            batch=micro_batch(self._step.batch, choice.accumulate, self._batch_dim),
            accumulate=min(choice.accumulate, _REHEARSED),
            reduce_each=choice.reduces,
        )
        if step.ema is not None:  # averaged weights compute something else in their first step
            return rehearse_step(model, step, target)
        return rehearse_once(model, step, target, recipes=self._recipes)


def _needed(step: Rehearsal) -> int:
    """Return the bytes that a step takes of its device at most."""
    return step.peak.nbytes if step.device_type == "cpu" else step.device_bytes()[1]


def _first_micro_batch(time: StepTime) -> float:
    """Return the seconds from the first forward to the second, without the gathers that the first one waits for."""
    was, first = "", None
    for span in time.spans:
        if span.stream == "compute":
            first = span.begin if first is None else first
            if span.phase == "forward" and was == "backward":
                return span.begin - first
            was = span.phase
    return 0.0


def _carried_bytes(step: Rehearsal, phase: int) -> int:
    """Return the bytes of gradients that are held from the beginning of a phase to its end.

    Args:
        step: The step.
        phase: The number of the phase, which is not the last one.
    """
    begin, end = _span(step, phase)
    held = (item for item in step.allocations if item.kind == "gradient" and item.begin < begin)
    return sum(item.nbytes for item in held if item.end is None or item.end >= end)


def _kept_bytes(step: Rehearsal, phase: int) -> int:
    """Return the most bytes of activations that are held when every unit has begun its forward.

    A step that keeps gathered parameters has all of them then.

    Args:
        step: The step.
        phase: The number of the forward among the step's phases.
    """
    begin, end = _span(step, phase)
    begun: dict[str, int] = {}
    for item in step.operators:
        if item.unit and item.role == "compute" and begin <= item.moment < end:  # the root is there before
            begun.setdefault(item.unit, item.moment)
    last = max(begun.values(), default=end - 1)
    live = (item for item in step.allocations if item.begin < end and (item.end is None or item.end > last))
    return highest(item for item in live if item.kind in ACTIVATIONS)[0]


def _reduced_bytes(step: Rehearsal) -> int:
    """Return the bytes of the whole gradients that units reduce in the last backward, as micro-batches add them up.

    A micro-batch that does not reduce them leaves as much: `_carried_bytes`. ``fully_shard`` adds them up in the dtype
    in which they are sent (``to_accumulated_grad_if_needed`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py),
    other engines in the parameters' dtype in forward.
    """
    begin = max((moment for name, moment in step.phases if name == "backward"), default=0)
    sent = {
        item.unit: item.nbytes for item in step.collectives if item.name == "reduce_scatter" and item.moment > begin
    }
    return sum(min(_gradient_bytes(unit, step), sent.get(unit.fqn, 0)) for unit in step.plan.units)


def _gradient_bytes(unit: ShardUnit, step: Rehearsal) -> int:
    reduced = unit.precision.reduce_dtype if step.engine == "fsdp2" else None
    trained = (param for param in unit.params if param.requires_grad)
    return sum(param.numel * (itemsize(reduced) if reduced else compute_itemsize(unit, param)) for param in trained)


def _span(step: Rehearsal, phase: int) -> tuple[int, int]:
    return step.phases[phase][1], step.phases[phase + 1][1]
