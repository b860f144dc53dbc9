"""Compares training with its rehearsal: the first steps, and then any step that leaves the forecast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.basics.text import human_bytes
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.allocator.kept import kept_bytes, retries_said, retries_so_far
from mmfsdp.rehearsal.measured.unit_times import UnitTimes
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import StepTime, beside, human_seconds
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model
from mmfsdp.runtime.torch_fsdp2.observing import subscribe, unsubscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import unit_of

__all__ = ["FirstSteps", "ForecastWatch"]

_SKIPPED = 2  # steps that make the optimizer's state, and fill caches
_DIFFERENT = 0.02  # share by which bytes that are kept must differ
_HIGHER = 0.05  # share by which the peak of a GPU must be higher: a little more than forecasts are uncertain
_SHORTEST = 1e-4  # seconds: what takes less is not worth a sentence
_MICRO = 1e-6
_NOBODY = 1 << 40


class FirstSteps:
    """Compares the first steps of training with a rehearsal, on this rank. Not collective; it sends nothing.

    Call `step` after each optimizer step. The time of a step is the median from one call to the next, so it contains
    what the loop does in between, such as loading data. On CUDA the peaks are what torch's allocator reports since the
    process began; CPU memory is not measured. If the GPU was full in these steps, the line says so.

    Args:
        rehearsal: The step as it was rehearsed.
        device: What to predict its time with, see `Rehearsal.time`. Default: the device of the rehearsal; without one,
            no time is predicted.
        steps: How many steps to time, after two that do not count.
        clock: Returns seconds.

    Raises:
        ConfigError: There are no steps, or the device is not known.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        *,
        device: str | Device | None = None,
        steps: int = 5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"FirstSteps times at least 1 step, got {steps}.", config="steps")
        self._rehearsal, self._steps, self._clock = rehearsal, steps, clock
        predicted = _forecast(rehearsal, device)
        self._predicted = None if predicted is None else predicted.seconds
        self._marks: list[float] = []
        self._retries = 0

    def step(self) -> str | None:
        """Note that a step has ended; return a line to log, once, after the last one that is timed."""
        self._marks.append(self._clock())
        if len(self._marks) == _SKIPPED:
            self._retries = retries_so_far()
        if len(self._marks) != _SKIPPED + self._steps:
            return None
        times = self._marks[_SKIPPED - 1 :]
        seconds = _median(times)
        found = self._rehearsal
        parts = [_beside("step", self._predicted, seconds, human_seconds)]
        if found.device_type == "cuda" and torch.cuda.is_available():
            parts.append(_beside("peak", found.peak.nbytes, torch.cuda.max_memory_allocated(), human_bytes))
            low, high = map(human_bytes, found.reserved())
            parts.append(
                f"reserved {low} to {high} predicted, {human_bytes(torch.cuda.max_memory_reserved())} measured"
            )
        else:
            parts.append(f"peak {human_bytes(found.peak.nbytes)} predicted")
        said = retries_said(retries_so_far() - self._retries, self._steps)
        return f"Rehearsal of rank {found.rank} of {found.mesh}: {'; '.join(parts)}" + (f". {said}" if said else "")


class ForecastWatch:
    """Compares one step in ``every`` with the rehearsal for as long as training runs. Collective: every rank.

    Call `step` on every rank after each optimizer step, as often on all. Of each window of steps the last one is
    followed unit by unit; the others cost two readings of a clock. At its end ranks exchange one message of 32 bytes
    per unit. A sentence is returned on every rank, once for as long as it holds:

    - a unit is gathered or reduced more or less often than in the forecast (engine ``fsdp2``),
    - the rank keeps other bytes of parameters, buffers or optimizer state (2 %), or on CUDA the peak is higher (5 %),
    - torch gave cached memory back to a full GPU, which makes steps wait,
    - steps take longer than the forecast's interval, with the unit that computes or waits longest beyond its forecast,
    - ranks differ in the time that they compute: the slowest, and the unit in which it loses most.

    Units are timed on the CPU, or on another device's compute stream. Outside of units are the root,
    the loss, the optimizer, and what the loop does in between, such as waiting for data.

    Args:
        rehearsal: The step as it was rehearsed, for this rank or another one.
        model: The sharded model that trains.
        optimizer: Its optimizer, to compare its state; None to leave that out.
        device: What to predict times with, see `Rehearsal.time`. Default: the device of the rehearsal; without one,
            ranks are compared with each other, and no time is predicted.
        every: Steps of a window, at least 2.
        tolerance: By which share a step may be longer than the forecast's interval, and ranks may differ in time.
        clock: Returns seconds.

    Raises:
        ConfigError: A setting is out of its range, or the device is not known.
        ShardStateError: The model is not sharded.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        device: str | Device | None = None,
        every: int = 100,
        tolerance: float = 0.1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 2:
            raise ConfigError(f"A window has at least 2 steps, got {every}.", config="every")
        if not 0 < tolerance < 10:
            raise ConfigError(f"tolerance is a share such as 0.1, got {tolerance}.", config="tolerance")
        self._state = find_sharded_model(model)
        self._rehearsal, self._optimizer, self._every, self._clock = rehearsal, optimizer, every, clock
        self._tolerance = tolerance
        self._predicted = _forecast(rehearsal, device)
        self._times: UnitTimes | None = None
        self._marks: list[float] = []
        self._steps, self._retries = -_SKIPPED, 0
        self._said: set[str] = set()

    def step(self) -> list[str]:
        """Note that a step has ended, and return what has left the forecast since the last window. Collective."""
        self._marks.append(self._clock())
        self._steps += 1
        if self._steps == 0:
            self._retries = retries_so_far()
        index = self._steps % self._every
        if self._steps > 0 and index == self._every - 1:
            self._times = UnitTimes(self._state.mesh.device_type, self._clock)
            subscribe(self._times, self._state.groups)
            self._times.begin()
        if index or self._times is None:
            return []
        times, self._times = self._times, None
        times.end()
        unsubscribe(times, self._state.groups)
        marks, self._marks = self._marks[:-1], self._marks[-1:]  # without the step that was followed
        seconds = _median(marks[-self._every :])
        found = dict(self._found(times, seconds))
        new = [text for key, text in found.items() if key not in self._said]
        self._said = set(found)
        return new

    def _found(self, times: UnitTimes, seconds: float) -> Iterator[tuple[str, str]]:
        """Yield what differs: a key that stays the same from window to window, and the sentence."""
        if self._state.groups:
            yield from _sent(self._rehearsal, times)
        yield from self._held()
        before, self._retries = self._retries, retries_so_far()
        if said := retries_said(self._retries - before, self._every):
            yield "retries", said
        spent = times.seconds()
        if self._predicted is not None:
            yield from _slow(self._predicted, seconds, spent, self._tolerance)
        units = sorted({"", *map(unit_of, self._state.groups)})  # the model's: rehearsals of ranks may differ
        yield from _apart(self._state, units, spent, self._tolerance)

    def _held(self) -> Iterator[tuple[str, str]]:
        found = self._rehearsal
        for kind, size in kept_bytes(self._state.module, self._optimizer).items():
            expected = found.static.get(kind, 0)
            if abs(size - expected) > _DIFFERENT * max(size, expected):
                yield kind, f"{kind}: {human_bytes(size)} here, {human_bytes(expected)} in the forecast."
        if found.device_type == "cuda" and torch.cuda.is_available():
            peak, most = torch.cuda.max_memory_allocated(), found.allocated()[1]
            if peak > (1 + _HIGHER) * most:
                yield "peak", f"The peak is {human_bytes(peak)}, {human_bytes(most)} in the forecast."


def _forecast(rehearsal: Rehearsal, device: str | Device | None) -> StepTime | None:
    """Return the time of a step on a device, or on the rehearsal's; None without either."""
    known = device or rehearsal.device
    return None if known is None else rehearsal.time(known)


def _median(marks: Sequence[float]) -> float:
    """Return the median of the times from one mark to the next."""
    return statistics.median(end - begin for begin, end in pairwise(marks))


def _beside(name: str, predicted: float | None, measured: float, shown: Callable[[Any], str]) -> str:
    if predicted is None:
        return f"{name} {shown(measured)} measured"
    return f"{name} {beside(predicted, measured, shown)}"


def _sent(rehearsal: Rehearsal, times: UnitTimes) -> Iterator[tuple[str, str]]:
    """Yield units that are gathered or reduced more or less often than in the forecast."""
    for name, counted in (("all_gather", times.gathers), ("reduce_scatter", times.reduces)):
        items = [item for item in rehearsal.collectives if item.name == name and item.unit is not None]
        for unit in sorted({item.unit or "" for item in items} & (times.gathers.keys() | times.reduces.keys())):
            own = [item for item in items if item.unit == unit]
            if counted[unit] != len(own):
                more = (counted[unit] - len(own)) * own[0].nbytes
                yield (
                    f"{name} {unit}",
                    f"{name} of {unit or 'the root'}: {counted[unit]} in a step, {len(own)} in the forecast, which is "
                    f"{human_bytes(abs(more))} {'more' if more > 0 else 'less'}.",
                )


def _slow(
    predicted: StepTime, seconds: float, spent: dict[tuple[str, str], float], tolerance: float
) -> Iterator[tuple[str, str]]:
    """Yield that steps take longer than they may, and where they lose most."""
    if seconds <= (1 + tolerance) * predicted.high:
        return
    expected: dict[tuple[str, str], float] = {}
    for span in predicted.spans:
        if span.stream == "compute":
            unit = span.unit or "" if span.phase in ("forward", "backward") else ""
            expected[unit, "compute"] = expected.get((unit, "compute"), 0.0) + span.end - span.begin
    for exposed, waited in predicted.exposed.items():
        expected[exposed or "", "gather"] = waited
    lost = {part: taken - expected.get(part, 0.0) for part, taken in spent.items()}
    unit, kind = max(lost, key=lambda part: lost[part])
    doing = {"compute": "computing of", "gather": "gathering of", "reduce": "reducing of"}[kind]
    where = unit or "all that is outside of units"
    yield (
        "slow",
        f"A step takes {human_seconds(seconds)}, {human_seconds(predicted.low)} to {human_seconds(predicted.high)} in "
        f"the forecast; most is lost in {doing} {where}: {human_seconds(spent[unit, kind])}, "
        f"{human_seconds(expected.get((unit, kind), 0.0))} in the forecast.",
    )


def _apart(
    state: ShardedModel, units: list[str], spent: dict[tuple[str, str], float], tolerance: float
) -> Iterator[tuple[str, str]]:
    """Yield the rank that computes longest, if it is much longer than the fastest. Collective: every rank."""
    scope = state.scope
    own = [int(spent.get((unit, "compute"), 0.0) / _MICRO) for unit in units]
    total = sum(own)
    lowest = scope.channel.lowest([total, -total, *own, *(-value for value in own)]) if scope.size > 1 else []
    if not lowest:
        return
    fastest, slowest = lowest[0], -lowest[1]
    least = lowest[2 : 2 + len(units)]
    # The slowest rank, and of its units the one that loses most, in one message: others send what nobody is below.
    lost = max(range(len(units)), key=lambda index: own[index] - least[index])
    [packed] = scope.channel.lowest([scope.rank * len(units) + lost if total == slowest else _NOBODY])
    rank, index = divmod(packed, len(units))
    if slowest <= (1 + tolerance) * fastest or (slowest - fastest) * _MICRO < _SHORTEST:
        return
    unit = units[index]
    yield (
        f"rank {rank}",
        f"Rank {rank} of {scope.size} computes {human_seconds(slowest * _MICRO)} in a step, the fastest "
        f"{human_seconds(fastest * _MICRO)}; most of it {f'in {unit}' if unit else 'outside of units'}.",
    )
