"""Runs a few real steps of a model on this machine's device, and compares them with the prediction."""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from mmfsdp.basics.text import human_bytes
from mmfsdp.config import ShardConfig
from mmfsdp.errors import ConfigError
from mmfsdp.planning.resolve import plan as make_plan
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.fakes.worlds import alone
from mmfsdp.rehearsal.measured.calibrating import calibrate, measure_links
from mmfsdp.rehearsal.rehearsing import rehearse
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.running.optimizers import OptimizerFn, optimizer_of
from mmfsdp.rehearsal.running.realising import real_batch, real_model
from mmfsdp.rehearsal.running.step import LossFn, default_loss, phase_seconds, run_step
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import StepTime, beside, human_seconds
from mmfsdp.sharding.apply import apply_plan

__all__ = ["Measured", "cpu_peak", "measure"]

_WARM = 2  # steps that are not counted


@dataclass(frozen=True)
class Measured:
    """The forecast of one rank's step, and measurements of real steps."""

    rehearsal: Rehearsal
    """The step as it was rehearsed."""
    predicted: StepTime
    """Its time."""
    seconds: float
    """The median of real steps."""
    peak: int
    """The most bytes that a real step held, beside ``rehearsal.peak``."""
    device: Device
    """The CPU, as it was calibrated; `write_device` keeps it."""

    @property
    def error(self) -> float:
        """How much longer the prediction is, as a share of the real time."""
        return self.predicted.seconds / self.seconds - 1

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        return {
            "mesh": self.rehearsal.mesh,
            "rank": self.rehearsal.rank,
            "step_seconds": {"predicted": self.predicted.seconds, "measured": self.seconds},
            "peak_bytes": {"predicted": self.rehearsal.peak.nbytes, "measured": self.peak},
        }

    def __str__(self) -> str:
        return f"A step: {beside(self.predicted.seconds, self.seconds, human_seconds)}; peak " + beside(
            self.rehearsal.peak.nbytes, self.peak, human_bytes
        )


def measure(
    plan: ShardPlan | ShardConfig | Mapping[str, Any] | None,
    model: nn.Module,
    batch: Any,
    *,
    loss: LossFn | None = None,
    optimizer: str | OptimizerFn | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    steps: int = 8,
    device: str | Device | None = None,
    clock: Callable[[], float] = time.perf_counter,
    budget: float = 0.01,
) -> Measured:
    """Rehearse a step on the CPU at hand, calibrate it, run real steps, and compare.

    In a process group it is collective: every rank, each with its own batch. All ranks calibrate at once, because they
    slow each other as they do in training. Without one, it measures one rank.

    The model is copied and not changed, so it needs its memory twice. Tensors on ``meta`` get values: random ones,
    integers are zero. The last step runs under torch's profiler, which sees what is allocated. See `mmfsdp.rehearse`.

    Args:
        plan: A plan for as many ranks as there are, or the settings.
        model: The model, on the CPU or on ``meta``.
        batch: What the rank gets in a micro-batch, on the CPU or on ``meta``.
        loss: Computes the loss; default: as `mmfsdp.rehearse` does.
        optimizer: The optimizer.
        max_norm: The norm to clip gradients to.
        accumulate: Number of micro-batches in the step.
        steps: How many steps to run, at least 3; the first two are not counted.
        device: What to predict with instead of a calibration: see `Rehearsal.time`.
        clock: Returns seconds; see `calibrate`.
        budget: About how many seconds to spend on an operator of a shape.

    Raises:
        ConfigError: There are too few steps, or the model cannot be copied.
        RankMismatchError: Ranks have different models or settings.
        MeshError: The plan is for another number of ranks.
        LostRankError: A rank does not take part.
        MmfsdpError: See `mmfsdp.rehearse`.
    """
    if steps <= _WARM:
        raise ConfigError(f"measure() needs at least {_WARM + 1} steps, got {steps}; the first {_WARM} do not count.")
    known = None if device is None else device_of(device)
    cpu = torch.device("cpu")
    in_group = dist.is_initialized()
    ranks = dist.get_world_size() if in_group else 1
    if not isinstance(plan, ShardPlan):
        plan = make_plan(model, plan, ranks)
    plan = plan.model_copy(update={"device": "cpu"})
    with contextlib.nullcontext() if in_group else alone():
        # The other ranks are asked first, so that none is waited for in vain.
        module = apply_plan(real_model(model, cpu), plan)
        found = rehearse(
            plan, model, batch, rank=dist.get_rank(), loss=loss, optimizer=optimizer, max_norm=max_norm,
            accumulate=accumulate, device_type="cpu",
        )  # fmt: skip
        if known is None:
            links = measure_links(clock) if ranks > 1 else None
            known = calibrate(found, clock=clock, links=links, together=ranks > 1, budget=budget)
        batches = [real_batch(batch, cpu) for _ in range(accumulate)]
        made = optimizer_of(optimizer, module, plan, "cpu")
        arguments = module, made, batches, loss or default_loss, max_norm
        taken = phase_seconds(*arguments, clock, steps)[_WARM:]
        step = partial(run_step, lambda _: None, module, batches, loss or default_loss, made, max_norm)
        peak = cpu_peak(
            step, [*module.parameters(), *module.buffers(), *tree_leaves([batches, [*made.state.values()]])]
        )
    seconds = statistics.median(sum(phases.values()) for phases in taken)
    return Measured(found, found.time(known), seconds, peak, known)


def cpu_peak(step: Callable[[], object], held: Iterable[Any]) -> int:
    """Return the most bytes that torch holds in CPU memory during a step, including those held before it.

    Args:
        step: Runs a step that leaves memory as it found it, such as any training step after the first.
        held: What is held before the step; other things than tensors are ignored.
    """
    gc.collect()  # what is freed later would be taken for the step's
    before = _storage_bytes(held)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]"]
    rows = [(event["ts"], event["args"]["Addr"], event["args"]["Bytes"]) for event in found]
    return before + _peak_of_events(rows)


def _peak_of_events(events: Iterable[tuple[float, int, int]]) -> int:
    """Return the peak of the bytes that a step allocates. Pure.

    What is allocated and never freed was freed by another thread, which the profiler does not see: gloo's, that frees
    its copies once they are sent. It does not count, nor does what was there before.

    Args:
        events: When, the address, and the bytes: positive ones are allocated, negative ones freed.
    """
    begun: dict[int, tuple[float, int]] = {}
    changes = []
    for moment, address, nbytes in sorted(events, key=lambda event: event[0]):
        if nbytes > 0:
            begun[address] = moment, nbytes
        elif address in begun:
            begin, size = begun.pop(address)
            changes += [(begin, size), (moment, -size)]
    held = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        peak = max(peak, held)
    return peak


def _storage_bytes(items: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, each counted once; of DTensors, this rank's storages."""
    local = [item.to_local() if isinstance(item, DTensor) else item for item in items if torch.is_tensor(item)]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (item.untyped_storage() for item in local)}
    return sum(storages.values())
