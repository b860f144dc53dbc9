"""Records the outcome of a run's saves: the one under way, those on disk, failures, and when to try again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.errors import CheckpointError
from mmfsdp.saving.writing.background import PendingSave

__all__ = ["SaveLedger"]

_LONGEST_PAUSE = 64  # steps between two attempts to save
_log = logging.getLogger("mmfsdp.saving")


class SaveLedger:
    """The saves of a run so far. The same on all ranks, as each method is called with the same step on each.

    Args:
        scope: The ranks.
        raise_errors: Raise the error of a save that failed, in place of logging and counting it.
        retain: Removes what need not be kept once a save is complete. Collective.
    """

    pending: tuple[int, PendingSave] | None
    """The save that may be running, and its step."""
    saved: int | None
    """The newest step that is saved, or is being saved."""
    complete: int | None
    """The newest step that is on disk."""
    newest: tuple[int, float | torch.Tensor | None] | None
    """The newest step that the loop told of, with its metric."""
    num_failed: int
    """How many saves have failed."""

    def __init__(self, scope: Scope, *, raise_errors: bool, retain: Callable[[], None]) -> None:
        self._scope, self._raise_errors, self._retain = scope, raise_errors, retain
        self.pending = self.saved = self.complete = self.newest = None
        self.num_failed = 0
        self._in_row = 0  # failed saves since the last one that succeeded
        self._retry_at: int | None = None
        self._is_fast = False
        self._begun = time.monotonic()

    def start_clock(self) -> None:
        """Count the time until the next save from now on."""
        self._begun = time.monotonic()

    def seconds(self) -> float:
        """Return how long ago the last save, or the run, began, by the clock of this rank."""
        return time.monotonic() - self._begun

    def resumed(self, step: int, *, saved: bool) -> None:
        """Record that the run goes on from a step.

        Args:
            step: The step.
            saved: Whether it need not be saved again.
        """
        self.complete, self.saved = step, step if saved else self.saved
        self.start_clock()

    def began(self, step: int, pending: PendingSave) -> None:
        """Record a save that has begun."""
        self.pending, self.saved, self._retry_at = (step, pending), step, None
        self._is_fast = False

    def began_fast(self, step: int, pending: PendingSave) -> None:
        """Record a save to the nodes' own disks: where the run's checkpoints are, the step is not saved by it."""
        self.pending, self._is_fast = (step, pending), True

    def failed(self, step: int, error: CheckpointError) -> None:
        """Count a save that failed, and plan when to try again.

        Raises:
            CheckpointError: The error itself, with ``raise_errors``.
        """
        self.num_failed += 1
        if self._raise_errors:
            raise error
        pause = min(2**self._in_row, _LONGEST_PAUSE)
        self._in_row += 1
        self._retry_at = step + pause
        if self._scope.is_first:
            _log.error("Step %d was not saved; step %d will be, or the next one. %s", step, self._retry_at, error)

    @property
    def has_failed(self) -> bool:
        """Whether the newest save failed."""
        return self._in_row > 0

    def is_retry_due(self, step: int) -> bool:
        """Whether a save that failed is to be tried again after a step."""
        return self._retry_at is not None and step >= self._retry_at

    def settle(self) -> None:
        """Wait for the save that is under way, if any, and record its outcome. Collective: every rank.

        Raises:
            CheckpointError: It failed, and ``raise_errors`` is set.
        """
        if self.pending is None:
            return
        (step, pending), self.pending = self.pending, None
        try:
            on_all_ranks(pending.settle, self._scope)
        except CheckpointError as error:
            self.saved = None
            self.failed(step, error)
        else:
            self.complete = step
            if not self._is_fast:  # a save that failed is not made up for by one that nodes lose with their disks
                self._in_row = 0
                self._retain()

    def check(self, path: Path) -> None:
        """Raise a ``CheckpointError`` if the newest save failed; ``path`` is where it should be."""
        if self._in_row:
            raise CheckpointError(
                f"The last {self._in_row} saves of this run failed; the log has the errors. Its newest steps are lost.",
                file=str(path),
            )

    def what_is_kept(self) -> str:
        """Say what is on disk, for a process that is about to end. Any thread may call this."""
        complete, pending = self.complete, self.pending
        if pending is not None and pending[1].succeeded():  # the loop has not come round to settle it
            complete = pending[0]
        lost = 0 if self.newest is None else self.newest[0] - (complete or 0)
        kept = "Nothing is saved" if complete is None else f"Step {complete} is complete on disk"
        return f"{kept}; {'no step' if not lost else 'one step' if lost == 1 else f'{lost} steps'} done since."
