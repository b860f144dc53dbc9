"""Runs a few real steps of a model on the CPU at hand, and puts their time beside what was predicted."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.rehearsal.calibrating import alone, calibrate, phase_seconds
from mmfsdp.rehearsal.optimizers import OptimizerFn, make_optimizer
from mmfsdp.rehearsal.rehearsing import rehearse
from mmfsdp.rehearsal.step import LossFn, default_loss
from mmfsdp.rehearsal.timing.devices import Device
from mmfsdp.rehearsal.timing.step_time import StepTime, human_seconds
from mmfsdp.sharding.apply import shard_in_place
from mmfsdp.sharding.device_mesh import build_mesh

__all__ = ["Measured", "measure"]

_WARM = 2  # steps that are not counted


@dataclass(frozen=True)
class Measured:
    """What was predicted of a step, and what real ones took."""

    predicted: StepTime
    seconds: float
    """The median of real steps."""
    device: Device
    """The CPU, as it was calibrated; `write_device` keeps it."""

    @property
    def error(self) -> float:
        """How much longer the prediction is, as a share of the real time."""
        return self.predicted.seconds / self.seconds - 1

    def __str__(self) -> str:
        predicted, real = human_seconds(self.predicted.seconds), human_seconds(self.seconds)
        return f"A step: {predicted} predicted, {real} measured ({self.error:+.1%})"


def measure(
    config: ShardConfig | Mapping[str, Any] | None,
    model: nn.Module,
    batch: Any,
    *,
    loss: LossFn | None = None,
    optimizer: str | OptimizerFn = "adamw",
    max_norm: float | None = None,
    steps: int = 8,
    clock: Callable[[], float] = time.perf_counter,
    budget: float = 0.01,
) -> Measured:
    """Rehearse a step on one rank of the CPU at hand, calibrate it, run real steps, and compare. Not collective.

    The model is copied and not changed, so it needs its memory twice. See `mmfsdp.rehearse`.

    Args:
        config: The settings.
        model: The model, with its weights on the CPU.
        batch: What the rank gets, on the CPU.
        loss: Computes the loss; default: as `mmfsdp.rehearse` does.
        optimizer: The optimizer.
        max_norm: The norm to clip gradients to.
        steps: How many steps to run, at least 3; the first two are not counted.
        clock: Returns seconds; see `calibrate`.
        budget: About how many seconds to spend on an operator of a shape.

    Raises:
        ConfigError: There are too few steps.
        ShardStateError: This process is in a process group.
        MmfsdpError: See `mmfsdp.rehearse`.
    """
    if steps <= _WARM:
        raise ConfigError(f"measure() needs at least {_WARM + 1} steps, got {steps}; the first {_WARM} do not count.")
    plan = make_plan(model, config, 1)
    found = rehearse(plan, model, batch, loss=loss, optimizer=optimizer, max_norm=max_norm, device_type="cpu")
    device = calibrate(found, clock=clock, budget=budget)
    predicted = found.time(device)
    with alone():
        state = shard_in_place(copy.deepcopy(model), plan, build_mesh(plan.mesh, "cpu"))
        made = make_optimizer(optimizer, list(state.module.parameters()), "cpu")
        taken = phase_seconds(state.module, made, [batch], loss or default_loss, max_norm, clock, steps)[_WARM:]
    return Measured(predicted, statistics.median(sum(phases.values()) for phases in taken), device)
