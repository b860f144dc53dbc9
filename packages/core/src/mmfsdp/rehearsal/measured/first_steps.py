"""Puts the first steps of training beside their rehearsal, from any training loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from mmfsdp.basics.text import human_bytes
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.allocator.kept import retries_said, retries_so_far
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import human_seconds

__all__ = ["FirstSteps"]

_SKIPPED = 2  # steps that make the optimizer's state, and fill caches


class FirstSteps:
    """Compares the first steps of training with a rehearsal, on this rank. Not collective; it sends nothing.

    Call `step` after each optimizer step. The time of a step is the median from one call to the next, so it contains
    what the loop does in between, such as loading data. On CUDA the peaks are those of torch's allocator since the
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
        known = device or rehearsal.device
        self._predicted = None if known is None else rehearsal.time(known).seconds
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
        seconds = statistics.median(end - begin for begin, end in pairwise(times))
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


def _beside(name: str, predicted: float | None, measured: float, shown: Callable[[Any], str]) -> str:
    if predicted is None:
        return f"{name} {shown(measured)} measured"
    return f"{name} {shown(predicted)} predicted, {shown(measured)} measured ({predicted / measured - 1:+.1%})"
