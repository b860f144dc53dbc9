"""Times and counts what each shard unit does in one real step: computing, gathering, reducing. Of this rank alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mmfsdp.runtime.torch_fsdp2.observing import Role, Subscriber, Turn
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, reduces, unit_of

__all__ = ["UnitTimes"]

Between = Callable[[Any, Any], float]
"""Returns the seconds between two marks."""


def _clock_of(device_type: str, clock: Callable[[], float]) -> tuple[Callable[[], Any], Between]:
    """Return what makes a mark now, and what tells the seconds between two marks.

    On the CPU marks are times of the clock. On other devices they are events on the stream that computes, because the
    CPU only issues the work; telling the time between two waits until the device has passed the second.
    """
    if device_type == "cpu":
        return clock, lambda begin, end: float(end - begin)
    module = torch.get_device_module(device_type)

    def mark() -> Any:
        event = module.Event(enable_timing=True)
        event.record()
        return event

    def between(begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    return mark, between


class UnitTimes(Subscriber):
    """Follows one step by the points of its parameter groups. What belongs to no unit is the root's, ``''``.

    Args:
        device_type: Where the step computes.
        clock: Returns seconds, for steps on the CPU.

    Attributes:
        gathers: How often each unit was gathered.
        reduces: How often each unit's gradients were reduced.
    """

    turn = Turn.MEASURING

    def __init__(self, device_type: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.gathers: Counter[str] = Counter()
        self.reduces: Counter[str] = Counter()
        self._mark, self._between = _clock_of(device_type, clock)
        self._unit = ""
        self._marks: list[tuple[str, str, Any]] = []  # what ends at a mark: a unit, and computing or its communication

    def begin(self) -> None:
        """Begin a step."""
        self._marks.append(("", "compute", self._mark()))

    def end(self) -> None:
        """End the step."""
        self._marks.append((self._unit, "compute", self._mark()))

    def seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds of each unit's ``compute``, ``gather`` and ``reduce``, once the step has ended."""
        found: dict[tuple[str, str], float] = {}
        for (_, _, begin), (unit, kind, end) in zip(self._marks, self._marks[1:], strict=False):
            found[unit, kind] = found.get((unit, kind), 0.0) + self._between(begin, end)
        return found

    def before_forward(self, group: Group) -> None:
        self._turn_to(unit_of(group))

    def before_backward(self, group: Group) -> None:
        self._turn_to(unit_of(group))

    def before_free(self, group: Group) -> None:
        if self._unit == unit_of(group):
            self._turn_to("")

    def reduced(self, group: Group) -> None:
        self.reduces[unit_of(group)] += reduces(group)
        self._unit = ""

    def gathered(self, group: Group) -> None:
        self.gathers[unit_of(group)] += 1

    def communicating(self, group: Group, role: Role) -> AbstractContextManager[None]:
        return self._follow(unit_of(group), role)

    @contextmanager
    def _follow(self, unit: str, role: Role) -> Iterator[None]:
        self._marks.append((self._unit, "compute", self._mark()))
        yield
        self._marks.append((unit, role, self._mark()))

    def _turn_to(self, unit: str) -> None:
        self._marks.append((self._unit, "compute", self._mark()))
        self._unit = unit
