"""The least that a step computes, however its parameters are sharded, and the least it would recompute. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import busy_device, works_of

__all__ = ["Computing", "Seconds", "computing_of", "summed"]

_SURE = 0.75  # of an n-th of all layers, which may differ
_CHOSEN = {"modules", "check_fn", "save_ops"}  # settings by which less than all layers may be computed again


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long operators take."""

    device: float = 0.0
    """Seconds for which the device computes."""
    issue: float = 0.0
    """Seconds that the CPU takes to issue them."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.device + other.device, self.issue + other.issue)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(times * self.device, times * self.issue)

    def on(self, device: Device) -> float:
        """Return the seconds that pass at least."""
        return max(self.device, self.issue) if device.is_async else self.device + self.issue


@dataclass(frozen=True, slots=True)
class Computing:
    """The operators of forward and backward, told by what they are for."""

    every: Seconds = Seconds()
    """All but those that copy and cast what is sent."""
    repeated: Seconds = Seconds()
    """Those that activation checkpointing computes again."""
    full: Seconds = Seconds()
    """Those that mode ``full`` would compute again at least."""
    ops: Seconds = Seconds()
    """Those that mode ``ops`` would compute again at least."""
    gathered: Seconds = Seconds()
    """Those that copy gathered parameters, with ``fully_shard``."""
    reduced: Seconds = Seconds()
    """Those that copy and cast gradients before these are sent, with ``fully_shard``."""

    def again(self, settings: Mapping[str, Any] | None) -> Seconds:
        """Return what activation checkpointing with these settings would compute again at least."""
        stated = settings or {}
        mode = None if _CHOSEN & stated.keys() else stated.get("mode")
        if mode == "ops":
            return self.ops
        if mode == "full":
            return self.full
        if mode == "every_n":
            share: float = _SURE / stated.get("n", 2)
            return self.full * share
        return Seconds()


def summed(parts: Iterable[tuple[float, Computing]]) -> Computing:
    """Return the sum of what each part computes, times its weight."""
    weighted = [*parts]

    def total(name: str) -> Seconds:
        return sum((getattr(part, name) * weight for weight, part in weighted), Seconds())

    return Computing(*(total(field.name) for field in fields(Computing)))


def computing_of(step: Rehearsal, device: Device) -> Computing:
    """Return what a step computes.

    A layer is computed again up to its last product: what that returns is not kept for backward. Layers that have no
    backward, because they are frozen, are not computed again; what is of compiled ones, the compiler decides.

    Args:
        step: The step.
        device: The device.
    """
    trained = {item.unit for item in step.operators if item.phase == "backward" and item.role == "compute"}
    used = busy_device(step.collectives, device)
    works = works_of(step.operators, step.collectives, used, device.links, "usual")
    every = repeated = full = ops = gathered = reduced = Seconds()
    open_full: dict[str, Seconds] = {}  # by unit, since its last product, which is included
    open_ops: dict[str, Seconds] = {}
    sent: set[str | None] = set()  # units whose gradients have just been sent
    phase = ""
    for item, work in zip(step.operators, works, strict=True):
        if item.phase != phase:
            phase = item.phase
            open_full.clear()
            open_ops.clear()
        if phase not in ("forward", "backward"):
            continue
        taken = Seconds(0.0 if work.is_sent else work.seconds, work.issue)
        if item.role == "gather" and step.engine == "fsdp2" and not item.is_of_shards:
            gathered += taken
        if item.role == "reduce" and step.engine == "fsdp2":
            if work.is_sent:
                sent.add(item.unit)
            if work.is_sent or item.unit not in sent:
                reduced += taken
        if item.role != "compute" or work.is_sent:
            continue
        sent.clear()
        every += taken
        if item.is_repeated:
            repeated += taken
        if phase == "backward" or step.plan.compile or not item.unit or item.unit not in trained:
            continue
        if item.flops:
            full += open_full.pop(item.unit, Seconds())
            ops += open_ops.pop(item.unit, Seconds())
        else:
            open_ops[item.unit] = open_ops.get(item.unit, Seconds()) + taken
        open_full[item.unit] = open_full.get(item.unit, Seconds()) + taken
    return Computing(every, repeated, full, ops, gathered, reduced)
