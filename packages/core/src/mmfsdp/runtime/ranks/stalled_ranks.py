"""Decides from the reports of ranks which of them hold up all others: a function of messages and time."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Judge", "Whereabouts"]

_WINDOW = 60  # messages of each rank
_MOSTLY = 0.6  # of these a slow rank is behind


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is in its work."""

    host: str
    """The host's name."""
    progress: int
    """How many points of units and steps it has passed; the same on all ranks that are equally far."""
    step: int
    """How many optimizer steps it has done since ranks were watched."""
    doing: str
    """Its current activity, worded to follow "is": ``"gathering the shard unit 'blocks.0'"``."""
    busy: bool = False
    """Whether it does something that may take long: compile, save or load."""
    stack: str = ""
    """Where its main thread is, if it has not moved for long."""

    def as_json(self) -> dict[str, Any]:
        """Return a dict from which this can be made again."""
        return asdict(self)


@dataclass
class _Rank:
    last: Whereabouts | None
    heard: float
    free: float  # when it last moved, was as far as all others, or did what may take long


class Judge:
    """Listens to all ranks, and says which are stalled or slow.

    A rank is stalled if it has told nothing for ``limit`` seconds; or if for ``limit`` seconds no rank was less far,
    some rank was further, and it did not move, and neither compiled nor saved. So ranks that are equally far, whatever
    they do, are not stalled, and a rank that others have waited for in an evaluation or a save has as long to go on.

    Args:
        size: The number of ranks.
        limit: Seconds.
        now: The time, by the clock of the process that listens.
    """

    def __init__(self, size: int, limit: float, now: float) -> None:
        self._limit = limit
        self._ranks = [_Rank(None, now, now) for _ in range(size)]
        self._behind: deque[int | None] = deque(maxlen=_WINDOW)

    def hear(self, rank: int, told: Whereabouts, now: float) -> None:
        """Record the whereabouts that a rank reported."""
        known = self._ranks[rank]
        if known.last is None or known.last.progress != told.progress or told.busy:
            known.free = now
        known.last, known.heard = told, now
        if not self._last():
            for each in self._ranks:
                each.free = now

    def stalled(self, now: float) -> list[int]:
        """Return the ranks that hold up all others."""
        silent = [rank for rank in range(len(self._ranks)) if self.is_silent(rank, now, self._limit)]
        if silent:
            return silent
        last = self._last()
        held = [rank for rank in last if now - self._ranks[rank].free > self._limit]
        return held if held == last else []

    def slow(self) -> int | None:
        """Return a rank that was behind most times; call it once per message of each rank."""
        last = self._last()
        self._behind.append(last[0] if len(last) == 1 and not self._is_busy(last[0]) else None)
        if len(self._behind) < _WINDOW:
            return None
        rank, times = Counter(self._behind).most_common(1)[0]
        if rank is None or times < _MOSTLY * _WINDOW:
            return None
        self._behind.clear()
        return rank

    def describe(self, rank: int) -> str:
        """Return a sentence on where a rank is."""
        known = self._ranks[rank].last
        if known is None:
            return f"Rank {rank} has told nothing."
        return f"Rank {rank} on host {known.host!r} is {known.doing}, after {known.step} steps."

    def whereabouts(self, rank: int) -> Whereabouts | None:
        """Return the whereabouts that a rank reported last."""
        return self._ranks[rank].last

    def is_silent(self, rank: int, now: float, seconds: float) -> bool:
        """Return whether a rank has reported nothing for the given seconds."""
        return now - self._ranks[rank].heard > seconds

    def _last(self) -> list[int]:
        """Return the ranks that are least far, if others are further."""
        progress = [0 if known.last is None else known.last.progress for known in self._ranks]
        least = min(progress)
        return [] if max(progress) == least else [rank for rank, own in enumerate(progress) if own == least]

    def _is_busy(self, rank: int) -> bool:
        known = self._ranks[rank].last
        return known is not None and known.busy
