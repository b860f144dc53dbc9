"""Replays what the CPU issues on the streams of FSDP: one that computes, one that gathers and one that reduces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["STREAMS", "Replay", "Span", "Work", "replay"]

STREAMS = ("compute", "gather", "reduce", "replicate")
"""``replicate`` is where HYBRID_SHARD averages gradients over its replicas."""


class Work(NamedTuple):
    """One piece of work, in the order in which the CPU issues it."""

    name: str
    unit: str | None
    phase: str
    role: str
    """``compute``, ``gather``, ``reduce`` or ``host``, as an operator has it."""
    seconds: float
    """Its time on its stream."""
    issue: float
    """The CPU's time to issue it."""
    is_sent: bool = False
    """Whether it is a collective."""
    bound: str = "memory"
    """``compute`` or ``memory``: what bounds it, if it is not a collective."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a stream; neighbours of one unit and phase are one."""

    stream: str
    """One of `STREAMS`."""
    name: str
    """The collective, or ``compute``."""
    unit: str | None
    phase: str
    begin: float
    """Seconds from the beginning of the step."""
    end: float

    @property
    def place(self) -> tuple[str, str, str | None, str]:
        """Stream, name, unit and phase."""
        return self.stream, self.name, self.unit, self.phase


class Replay:
    """The streams of a rank.

    Attributes:
        free: When each stream has done its work.
        cpu: When the CPU has issued all its work.
        exposed: Seconds for which computing waits for a unit's communication.
        spent: Seconds by what computing spends them on.
    """

    def __init__(self) -> None:
        self.free = dict.fromkeys(STREAMS, 0.0)
        self.cpu = 0.0
        self.exposed: dict[str | None, float] = defaultdict(float)
        self.spent: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[tuple[str, str, str | None, str], float, float]] = []
        self._pending: dict[str | None, float] = {}  # units that are gathered, and when that ends
        self._copied: set[str | None] = set()  # units that are being copied out of the buffer
        self._copied_out = 0.0  # when the last one is
        self._reduced: set[str | None] = set()  # units whose gradients have just been sent
        self._sent = 0.0  # when the buffer of gradients can be filled again
        self._sender: str | None = None

    @property
    def seconds(self) -> float:
        """When everything is done."""
        return max(self.cpu, *self.free.values())

    @property
    def spans(self) -> list[Span]:
        """The work, as far as it takes time."""
        return [Span(*label, begin, end) for label, begin, end in self._spans]

    def run(self, stream: str, work: Work, after: float = 0.0) -> float:
        """Put work on a stream, and return when it ends."""
        begin = max(self.free[stream], self.cpu, after)
        end = self.free[stream] = begin + work.seconds
        if work.seconds:
            label = stream, work.name if work.is_sent else "compute", work.unit, work.phase
            if self._spans and not work.is_sent:
                last, began, ended = self._spans[-1]
                if last == label and begin <= ended + work.issue:
                    self._spans[-1] = label, began, end
                    return end
            self._spans.append((label, begin, end))
        return end

    def wait(self, until: float, unit: str | None) -> None:
        """Let computing wait for a unit's communication."""
        ready = max(self.free["compute"], self.cpu)
        if until > ready:
            self.exposed[unit] += until - ready
            self.spent["communication"] += until - ready
            self.spent["launches"] += ready - self.free["compute"]
            self.free["compute"] = until

    def compute(self, work: Work) -> None:
        """Compute; a unit that is gathered must have arrived."""
        if work.role == "compute":
            self._copied.clear()
            self._reduced.clear()
        if work.unit in self._pending:
            self.wait(self._pending.pop(work.unit), work.unit)
            if work.role == "gather":
                self._copied.add(work.unit)
                self._hold_gathers()  # until the unit before is copied out, in forward
        self.spent["launches"] += max(self.cpu - self.free["compute"], 0.0)
        end = self.run("compute", work)
        self.spent[work.bound] += work.seconds
        if work.role == "gather":
            self._copied_out = end
            if work.phase == "backward":
                self._hold_gathers()

    def _hold_gathers(self) -> None:
        """Let later gathers wait for the last copying, because they use its buffer again."""
        self.free["gather"] = max(self.free["gather"], self._copied_out)

    def gather(self, work: Work) -> None:
        """Copy shards into a buffer and gather them, or copy what was gathered out of it."""
        if work.is_sent:
            self._pending[work.unit] = self.run("gather", work)
            self._copied.discard(work.unit)
        elif work.unit in self._pending or work.unit in self._copied:
            self.compute(work)
        else:
            self.run("gather", work)

    def reduce(self, work: Work) -> None:
        """Copy gradients into a buffer, send them, and put what arrives where it belongs."""
        if not work.is_sent and work.unit not in self._reduced:
            self.wait(self._sent, self._sender)
            self.compute(work)
            return
        averages = work.is_sent and work.name == "all_reduce"
        end = self.run("replicate" if averages else "reduce", work, max(self.free["compute"], self.free["reduce"]))
        if work.is_sent:
            self._sender = work.unit
            self._reduced.add(work.unit)
        if not averages:
            self._sent = end

    def send(self, work: Work) -> None:
        """Communicate outside of units: gradients in backward, which nothing waits for yet, or what blocks."""
        end, self._sender = self.run("reduce", work, self.free["compute"]), work.unit
        if work.phase != "backward":
            self.wait(end, work.unit)

    def compute_on_host(self, work: Work) -> None:
        """Let the CPU compute with what has arrived in its memory, while the device does nothing."""
        self.spent["host"] += work.issue
        self.cpu = self.free["compute"] = self.seconds + work.issue

    def end_backward(self) -> None:
        """Let computing wait until all gradients are sent."""
        self.wait(max(self.free["reduce"], self.free["replicate"]), self._sender)


def replay(works: Sequence[Work], *, is_async: bool = True) -> Replay:
    """Return what happens when, by the rules of FSDP. Pure.

    A unit's parameters are gathered on one stream, in the order in which the CPU issues that; what computes with them,
    and what copies them out of the buffer, waits. What is gathered next waits for that copying in backward, and in
    forward for the one before (so torch 2.13 does when a unit waits for its own). Gradients are copied into a buffer
    where the device computes, then sent on another stream. That copying waits until the buffer before is sent
    (``fully_shard`` keeps one), and all are sent when backward ends. Collectives of backward that belong to no unit are
    gradients of DistributedDataParallel and FSDP1, which send them on a stream of their own; other collectives block.

    Args:
        works: What the CPU issues, in order.
        is_async: Whether the CPU runs ahead; otherwise everything happens in order, one after the other.
    """
    state = Replay()
    if not is_async:
        for work in works:
            _in_order(state, work)
        return state
    gathered = {work.unit for work in works if work.is_sent and work.role == "gather"}
    phase = ""
    for work in works:
        if work.role == "host":
            if phase == "backward":
                state.end_backward()
            phase = work.phase
            state.compute_on_host(work)
            continue
        state.cpu += work.issue
        if phase == "backward" != work.phase:
            state.end_backward()
        phase = work.phase
        if work.role == "gather" and work.unit in gathered:
            state.gather(work)
        elif work.role == "reduce":
            state.reduce(work)
        elif work.is_sent:
            state.send(work)
        else:
            state.compute(work)
    state.end_backward()
    state.spent["launches"] += max(state.cpu - state.free["compute"], 0.0)
    return state


def _in_order(state: Replay, work: Work) -> None:
    state.cpu = state.seconds + work.issue
    state.spent["launches"] += work.issue
    if not work.is_sent:
        state.spent[work.bound] += work.seconds
        state.run("compute", work)
        return
    state.exposed[work.unit] += work.seconds
    state.spent["communication"] += work.seconds
    state.run("gather" if work.role == "gather" else "reduce", work)
