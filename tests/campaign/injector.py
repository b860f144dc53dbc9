"""Lets one fault after the other strike a job, each in the phase that it was planned for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.campaign.faults import FAULTS
from tests.campaign.job import Job
from tests.campaign.plans import DELAYS

__all__ = ["Injector"]

_RESTARTED = 4.0  # seconds after which steps that still move tell that a fault restarted nothing


class Injector:
    """The faults of a job.

    Args:
        job: The job, before it is launched.
        planned: Phases and the faults that strike in them.
        gap: Seconds between two, on average.
    """

    def __init__(self, job: Job, planned: Sequence[tuple[str, str]], gap: float) -> None:
        self._job, self._left, self._gap = job, [*planned], gap
        self.struck: list[tuple[str, str]] = []
        """The faults so far, and the phases in which they did strike."""
        self._prepare()

    def act(self, moved: float) -> None:
        """Let the next fault strike if its phase has begun; take a moment otherwise.

        Args:
            moved: When a rank last did a step.
        """
        now = time.monotonic()
        if not self._left or now < self._due:
            time.sleep(0.02)
            return
        if not self._waits:
            self._wait()
        phase, name = self._left[0]
        rank = self._job.board.has_entered(0.1)
        if rank is not None:
            del self._left[0]
            time.sleep(self._job.chance.uniform(0.0, DELAYS[phase]))
            self._strike(rank, name)
            self._prepare()
        elif phase in ("start-up", "load") and min(now, moved + _RESTARTED / 2) > self._due + _RESTARTED:
            self._strike(0, "kill a rank")  # the fault before has restarted nothing
            self._due = time.monotonic()

    def _strike(self, rank: int, name: str) -> None:
        phase = self._job.board.phase(rank)  # the one that it is in by now
        if FAULTS[name].act(self._job):
            self.struck.append((phase, name))

    def _prepare(self) -> None:
        """Make the next fault wait for its phase: at once, as this may be the start-up that follows now."""
        self._due = time.monotonic() + self._job.chance.uniform(0, 2 * self._gap)
        self._waits = False
        if self._left and not self._gap:
            self._wait()

    def _wait(self) -> None:
        self._waits = True
        self._job.board.await_phase(self._left[0][0])
