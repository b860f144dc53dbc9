"""Decides after each step of a run, on all ranks alike, whether to save and whether to leave, and does so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import torch

from mmfsdp.checkpoint.files.atomic import TargetExistsError
from mmfsdp.collective.scopes import Scope
from mmfsdp.errors import CheckpointError, ConfigError, RunDirectoryError
from mmfsdp.saving.directory.run import check_count
from mmfsdp.saving.loop.ledger import SaveLedger
from mmfsdp.saving.loop.step_messages import Notice, StepMessages
from mmfsdp.saving.loop.stopping import Stopping
from mmfsdp.saving.writing.background import PendingSave

__all__ = ["LoopSettings", "RunWriter", "SaveLoop"]


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """When to save, and how to stop; `mmfsdp.CheckpointManager` explains each.

    Raises:
        ConfigError: A setting has a wrong value.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    background: bool = True
    if_busy: Literal["wait", "skip"] = "wait"
    is_tiered: bool = False
    """Whether there is a fast directory."""
    fast_every_steps: int | None = None
    raise_errors: bool = False
    grace_seconds: float | None = 30.0
    exit_code: int = 75

    def __post_init__(self) -> None:
        check_count("every_steps", self.every_steps)
        check_count("fast_every_steps", self.fast_every_steps)
        if self.every_minutes is not None and not 0 < self.every_minutes < math.inf:
            raise ConfigError(f"every_minutes={self.every_minutes!r} is not a positive number.")
        if self.if_busy not in ("wait", "skip"):
            raise ConfigError(f"if_busy must be 'wait' or 'skip', got {self.if_busy!r}.")
        if self.is_tiered != (self.fast_every_steps is not None):
            raise ConfigError("fast_directory and fast_every_steps belong together: pass both, or neither.")
        grace, code = self.grace_seconds, self.exit_code
        if grace is not None and not 0 < grace < math.inf:
            raise ConfigError(f"grace_seconds={grace!r} is not a positive number; None leaves signals alone.")
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < 256:
            raise ConfigError(f"exit_code={code!r} is not a whole number from 0 to 255.")

    def is_due(self, step: int) -> bool:
        """Whether a step is one after which to save."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_due_fast(self, step: int) -> bool:
        """Whether a step is one after which to save to the fast directory."""
        return self.fast_every_steps is not None and step % self.fast_every_steps == 0

    def have_passed(self, seconds: float) -> bool:
        """Whether it is time to save again, ``seconds`` after the last save."""
        return self.every_minutes is not None and seconds >= 60 * self.every_minutes


class RunWriter(Protocol):
    """Writes the checkpoints of a run. Each method is collective."""

    def prepare(self, step: int, metric: float | torch.Tensor | None) -> Callable[[], PendingSave]:
        """Collect the content of this step's checkpoint; the result, called on all ranks, begins to write it.

        What this raises ends training; a ``CheckpointError`` of the result means that the save failed.
        """

    def write_fast(self, step: int) -> PendingSave:
        """Begin a save to the nodes' own disks, where the settings have a fast directory."""

    def retain(self) -> None:
        """Remove what need not be kept, once a save is complete."""


class SaveLoop:
    """The saves of a training loop, whatever they hold. Making one and all methods but `release` are collective.

    Args:
        settings: When to save, and how to stop.
        scope: The ranks, with a group that no other messages use.
        writer: What writes.
        place: Where it writes, for messages.
    """

    ledger: SaveLedger
    """What came of the saves."""
    stopping: Stopping
    """Whether this process was asked to leave."""

    def __init__(self, settings: LoopSettings, scope: Scope, writer: RunWriter, place: Path) -> None:
        self._settings, self._scope, self._writer, self._path = settings, scope, writer, place
        self._messages = StepMessages(scope)
        self._asked_about: PendingSave | None = None  # the save that the message under way is about
        self.ledger = SaveLedger(scope, raise_errors=settings.raise_errors, retain=writer.retain)
        self.stopping = Stopping(settings.grace_seconds, settings.exit_code, self.ledger.what_is_kept)

    def step(self, step: int, metric: float | torch.Tensor | None = None) -> bool:
        """Save if it is time to, and leave if a rank was asked to: see `mmfsdp.CheckpointManager.step`."""
        self.ledger.newest = step, metric
        due = self._settings.is_due(step) or self.ledger.is_retry_due(step)
        heard = self._hear()
        if heard.stop:
            self._leave(step, metric, heard)
        skips = self.skips
        saved = self.save(step, metric) if (due or heard.due) and not skips else False
        if not saved and not skips and self._settings.is_due_fast(step) and step != self.ledger.saved:
            saved = self._save_fast(step)
        self._tell()
        return saved

    def leave_if_asked(self, step: int, *, again: bool = False) -> None:
        """Save and leave if a rank was asked to: see `mmfsdp.CheckpointManager.leave_if_asked`.

        Args:
            step: How many steps are done.
            again: See `save`.
        """
        self.ledger.newest = step, None
        heard = self._hear()
        if heard.stop:
            self._leave(step, None, heard, again=again)
        self._tell()

    @property
    def skips(self) -> bool:
        """Whether a save that is due now is left out, as another one is running. The same on all ranks."""
        return self._settings.if_busy == "skip" and self.ledger.pending is not None

    def save(self, step: int, metric: float | torch.Tensor | None = None, *, again: bool = False) -> bool:
        """Save: see `mmfsdp.CheckpointManager.save`.

        Args:
            step: How many steps are done.
            metric: How good the model is.
            again: Also save a step that is saved already.

        Returns:
            Whether this step is saved, or is being saved.
        """
        self.ledger.newest = step, metric
        self.ledger.settle()
        if step == self.ledger.saved and not again:
            return True
        begin = self._writer.prepare(step, metric)
        self.ledger.start_clock()
        try:
            pending = begin()
        except (TargetExistsError, RunDirectoryError):
            raise
        except CheckpointError as error:
            self.ledger.failed(step, error)
            return False
        self.ledger.began(step, pending)
        if not self._settings.background:
            self.ledger.settle()
        return True

    def close(self) -> None:
        """Wait for the last save; if it failed, save the newest step once more.

        Raises:
            CheckpointError: The second attempt also failed.
        """
        self._messages.receive()
        self.ledger.settle()
        if self.ledger.has_failed and self.ledger.newest is not None:
            self.save(*self.ledger.newest)
        self.ledger.settle()
        self.ledger.check(self._path)

    def release(self) -> None:
        """Give the signals back, and wait for nothing. Not collective."""
        self.stopping.close()

    def _save_fast(self, step: int) -> bool:
        self.ledger.settle()
        try:
            pending = self._writer.write_fast(step)
        except CheckpointError as error:
            self.ledger.failed(step, error)
            return False
        self.ledger.began_fast(step, pending)
        if not self._settings.background:
            self.ledger.settle()
        return True

    def _notice(self) -> Notice:
        """Return what this rank can tell the others at the end of a step."""
        passed = self._settings.have_passed(self.ledger.seconds())
        self._asked_about = None if self.ledger.pending is None else self.ledger.pending[1]
        running = self._asked_about is not None and not self._asked_about.done()
        return Notice(passed and self._scope.is_first, running, self.stopping.is_asked)

    def _tell(self) -> None:
        if self._settings.every_minutes is not None or self.ledger.pending is not None or self.stopping.is_on:
            self._messages.send(self._notice)

    def _hear(self) -> Notice:
        """Return what ranks know as of a step before; take the outcome of a save that has ended on all."""
        heard = self._messages.read(self._notice)
        if heard is None:
            return Notice()
        pending = self.ledger.pending
        if pending is not None and pending[1] is self._asked_about and not heard.running:
            self.ledger.settle()
        return heard

    def _leave(self, step: int, metric: float | torch.Tensor | None, heard: Notice, *, again: bool = False) -> NoReturn:
        self.stopping.ask()  # a rank that got no signal has as little time as the others
        self.save(step, metric, again=again)
        self.ledger.settle()
        self.stopping.leave(heard.sender, tells=self._scope.is_first)
