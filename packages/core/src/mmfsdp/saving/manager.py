"""Owns the checkpoints of a run in a training loop: when to save, which to keep, and where to resume."""

from __future__ import annotations

import atexit
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.atomic import TargetExistsError
from mmfsdp.checkpoint.files.disk import place, refuse_empty
from mmfsdp.collective.scopes import new_scope
from mmfsdp.collective.steps import check_same_arguments, on_all_ranks, same_path, shared
from mmfsdp.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    RunDirectoryError,
)
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.background import PendingSave
from mmfsdp.saving.load import load_with_rest
from mmfsdp.saving.manager_settings import ManagerSettings
from mmfsdp.saving.node_tier import NodeTier
from mmfsdp.saving.publishing import as_checkpoint_error
from mmfsdp.saving.run_directory import Retention, RunDirectory
from mmfsdp.saving.run_state import RunState, Stateful
from mmfsdp.saving.run_store import RunStore
from mmfsdp.saving.save import save_checkpoint
from mmfsdp.saving.step_messages import Notice, StepMessages
from mmfsdp.saving.stop_signals import StopSignals

__all__ = ["CheckpointManager"]

_LONGEST_PAUSE = 64  # steps between two attempts to save
_log = logging.getLogger("mmfsdp.saving")


class CheckpointManager:
    """Saves a run while it trains, keeps the checkpoints that matter, and resumes from the newest complete one.

    Use it as a context manager: leaving the block waits for the last save; after an exception it waits for nothing.
    `resume`, `step`, `save`, `close` and making one are collective: every rank of the model's mesh.

    Args:
        directory: Where the checkpoints of this run go: ``step_100``, ``step_200``, ... The same on every rank. A path,
            or a URL in a store: ``s3://bucket/run``.
        model: A sharded model.
        optimizer: Built from its parameters.
        every_steps: Save every n steps.
        every_minutes: Save once this many minutes have passed since the last save, by the clock of the first rank. The
            ranks agree by a message, so the save comes a step later, or up to a quarter of a second if steps are fast.
        max_to_keep: How many of the newest checkpoints to keep; all if ``None``.
        keep_period: Also keep those of every n-th step.
        keep_best: Also keep this many with the best metric, which `step` and `save` take.
        best_mode: ``'min'`` if small metrics are good, ``'max'`` if large ones are.
        kind: ``sharded``, ``local`` or ``full``: see `save_checkpoint`.
        background: Write while training continues, which waits only until each rank has copied its part.
        if_busy: What to do if the save before is still running when the next one is due: ``wait`` for it, or ``skip``
            the next one. `save` always waits.
        fast_directory: A directory on each node's own disk or in its memory, for frequent saves between those to
            ``directory``: each rank's file has a copy on the next node. A run resumes from it on as many ranks.
        fast_every_steps: Save there every n steps.
        schedulers: A learning rate scheduler, or several.
        scaler: A gradient scaler.
        averaged: A second sharded model with averaged weights.
        state: More objects with ``state_dict()`` and ``load_state_dict()`` by name, such as a data loader. If a state
            differs between ranks, which is logged at the first save, the run resumes only on as many ranks.
        safe_globals: Classes that states may hold besides tensors and plain data.
        run: The name of the run. A directory of a run with another name is refused.
        raise_errors: Raise the error of a save that fails. By default it is logged, counted in `failed_saves`, and
            the save is tried again after 1, 2, 4, ... steps, 64 at most.
        grace_seconds: How long the process may live after SIGTERM or SIGUSR1, which schedulers send before they kill
            it: all ranks save after the same step, and leave. ``None`` leaves signals alone.
        exit_code: The exit code of ranks that leave so. Launchers start the job again unless it is 0.

    Raises:
        RunDirectoryError: The directory belongs to another run or model, or a running job uses it.
        ConfigError: A setting has a wrong value.
        RankMismatchError: Ranks gave different settings.
    """

    def __init__(
        self,
        directory: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        keep_best: int = 0,
        best_mode: Literal["min", "max"] = "min",
        kind: Literal["full", "local", "sharded"] = "sharded",
        background: bool = True,
        if_busy: Literal["wait", "skip"] = "wait",
        fast_directory: str | Path | None = None,
        fast_every_steps: int | None = None,
        schedulers: Stateful | Sequence[Stateful] = (),
        scaler: Stateful | None = None,
        averaged: nn.Module | None = None,
        state: Mapping[str, Stateful] | None = None,
        safe_globals: Sequence[Any] = (),
        run: str | None = None,
        raise_errors: bool = False,
        grace_seconds: float | None = 30.0,
        exit_code: int = 75,
    ) -> None:
        refuse_empty(directory)
        self._settings = ManagerSettings(
            every_steps=every_steps,
            every_minutes=every_minutes,
            retention=Retention(max_to_keep, keep_period, keep_best, best_mode),
            kind=kind,
            background=background,
            if_busy=if_busy,
            is_tiered=fast_directory is not None,
            fast_every_steps=fast_every_steps,
            raise_errors=raise_errors,
            grace_seconds=grace_seconds,
            exit_code=exit_code,
        )
        sharded = find_sharded_model(model)
        # Messages of the steps must not mix with those of saves, which may be running.
        self._scope = new_scope(sharded.mesh)
        listed = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
        named = {f"scheduler {number}": item for number, item in enumerate(listed)}
        named |= {} if scaler is None else {"scaler": scaler}
        self._state = RunState(named, dict(state or {}), averaged, sharded.mesh, safe_globals)
        given = {**vars(self._settings), "state": sorted([*named, *(state or {})]), "averaged": averaged is not None}
        check_same_arguments(self._scope, "CheckpointManager()", given)
        self.directory = place(same_path(directory, self._scope))
        self._model, self._optimizer, self._safe_globals = model, optimizer, safe_globals
        self.failed_saves = 0
        """How many saves have failed so far."""
        self._in_row = 0  # failed saves since the last one that succeeded
        self._retry_at: int | None = None
        self._pending: tuple[int, PendingSave] | None = None
        self._newest: tuple[int, float | torch.Tensor | None] | None = None  # the newest step that was told
        self._saved: int | None = None  # the newest step that is saved, or is being saved
        self._complete: int | None = None  # the newest step that is on disk
        self._messages = StepMessages(self._scope)
        self._asked_about: PendingSave | None = None  # the save that the message under way is about
        self._signals: StopSignals | None = None
        self._begun = time.monotonic()
        shapes = repr(sorted((param.fqn, param.shape) for param in sharded.plan.all_params()))
        identity = hashlib.sha256(shapes.encode()).hexdigest()

        def open_directory() -> RunDirectory | RunStore | None:
            with as_checkpoint_error(self.directory):
                keeper = RunStore if is_remote(self.directory) else RunDirectory
                return keeper(self.directory, run=run, model=identity) if self._scope.is_first else None

        self._files = on_all_ranks(open_directory, self._scope)
        self._unread = shared(lambda: self._files and len(self._files.checkpoints()), self._scope)
        self._fast = None
        if fast_directory is not None:
            where = Path(same_path(fast_directory, self._scope))
            try:
                self._fast = NodeTier(where, sharded.mesh, self._scope, model=identity, run=run)
            except BaseException:
                self._release()
                raise
        if grace_seconds is not None:
            self._signals = StopSignals(grace_seconds, exit_code, self._what_is_kept)

    def resume(self) -> int:
        """Load the newest checkpoint that is complete and undamaged; return how many steps it has done, or 0.

        Checkpoints that are incomplete or damaged are skipped, with a line in the log of ``mmfsdp.saving``, and are
        renamed once an older one is loaded: ``step_200.damaged``. Call it when everything that is saved exists, right
        before the loop. Collective: every rank.

        Raises:
            IncompleteCheckpointError: There are checkpoints, and none of them can be loaded.
            RunDirectoryError: The run has other objects than the one that saved, or it needs as many ranks. As the
                next one, raised before anything is loaded.
            StateDictError: Names or shapes do not fit the model or optimizer.
        """
        found = shared(lambda: self._files.complete() if self._files else None, self._scope) or []
        if (fast := self._resume_fast(found[0][0] if found else 0)) is not None:
            return fast
        for step, path in found:
            try:
                rest, _, source = load_with_rest(
                    path,
                    self._model,
                    self._optimizer,
                    safe_globals=self._safe_globals,
                    lazy=("run", "averaged"),
                    prepare=lambda content: self._state.examined(content, self._scope.size),
                )
                self._state.restore(rest, self._scope)
                on_all_ranks(source.check_unchanged, self._scope)
            except (CorruptCheckpointError, IncompleteCheckpointError) as error:
                if self._scope.is_first:
                    _log.warning("Skipped the checkpoint %r, which is damaged: %s", str(path), error)
                continue
            self._on_first(lambda files, step=step: files.set_aside(step), path)  # type: ignore[misc]
            if self._scope.is_first:
                _log.info("Resumed from %r, which has done %d steps.", str(path), step)
            self._saved = self._complete = step
            self._unread, self._begun = 0, time.monotonic()
            return step
        if self._unread:
            raise IncompleteCheckpointError(
                f"None of the {self._unread} checkpoints in the directory can be loaded; the log names what is wrong "
                "with each. Restore one of them, or start again in another directory.",
                file=str(self.directory),
            )
        return 0

    def _resume_fast(self, least: int) -> int | None:
        """Resume from the disks of the nodes, if what they have together is newer than a step. Collective."""
        if self._fast is None:
            return None
        try:
            step = self._fast.newest()
            if step is None or step <= least:
                return None
            self._fast.load(step, self._model, self._optimizer, self._state, self._safe_globals)
        except (CorruptCheckpointError, IncompleteCheckpointError) as error:
            if self._scope.is_first:
                _log.warning("Skipped what the nodes have on their own disks: %s", error)
            return None
        self._on_first(lambda files: files.set_aside(step), self.directory)
        if self._scope.is_first:
            _log.info("Resumed from the nodes' own disks, which have done %d steps.", step)
        self._complete, self._unread, self._begun = step, 0, time.monotonic()
        return step

    def step(self, step: int, metric: float | torch.Tensor | None = None) -> bool:
        """Save if it is time to, once a step is done; after a signal save and leave. Collective: every rank.

        Args:
            step: How many steps are done, on every rank the same.
            metric: How good the model is, by which ``keep_best`` chooses; the first rank's counts.

        Returns:
            Whether this step was saved, or is being saved.

        Raises:
            RunDirectoryError: The directory has checkpoints, and `resume` was not called.
            CheckpointError: The save failed, or the one before it, and ``raise_errors`` is set.
            LostRankError: Another rank is gone.
            SystemExit: Some rank got a signal or called `request_stop`, and all ranks have saved.
        """
        self._refuse_unread()
        self._newest = step, metric
        due = self._settings.is_due(step)
        due |= self._retry_at is not None and step >= self._retry_at
        heard = self._hear()
        if heard.stop:
            self._stop(step, metric, heard)
        # All ranks know alike that it has not ended.
        skips = self._settings.if_busy == "skip" and self._pending is not None
        saved = self.save(step, metric) if (due or heard.due) and not skips else False
        if not saved and not skips and self._settings.is_due_fast(step):
            saved = self._save_fast(step)
        self._tell()
        return saved

    def _save_fast(self, step: int) -> bool:
        """Save to the disks of the nodes. Collective."""
        assert self._fast is not None
        self._finish()
        try:
            pending = self._fast.save(step, self._model, self._optimizer, self._state)
        except CheckpointError as error:
            self._failed(step, error)
            return False
        self._pending = step, pending
        if not self._settings.background:
            self._finish()
        return True

    def leave_if_asked(self, step: int) -> None:
        """After a signal save and leave, as `step` does; call it between the batches of an evaluation. Collective.

        Args:
            step: How many steps are done. The weights must be those after this step.

        Raises:
            LostRankError: Another rank is gone.
            SystemExit: See `step`.
        """
        self._refuse_unread()
        self._newest = step, None
        heard = self._hear()
        if heard.stop:
            self._stop(step, None, heard)
        self._tell()

    def request_stop(self) -> None:
        """Make all ranks save and leave after their step, as SIGTERM does. Not collective: any rank, thread or handler.

        Use it where the notice comes by other ways than a signal, such as the metadata server of a cloud.

        Raises:
            ConfigError: ``grace_seconds`` is ``None``.
        """
        if self._signals is None:
            raise ConfigError("request_stop() needs grace_seconds, the time that ranks have to save and leave.")
        self._signals.ask()

    def save(self, step: int, metric: float | torch.Tensor | None = None) -> bool:
        """Save now, unless this step is saved already. Collective: every rank.

        A save that is still running in the background is waited for.

        Args:
            step: See `step`.
            metric: See `step`.

        Returns:
            Whether this step is saved, or is being saved.

        Raises:
            TargetExistsError: There is a checkpoint of this step that this run has not made or loaded.
            UnsafePickleError: At the first save: some state holds an object that could not be loaded.
            RunDirectoryError: See `step`.
            CheckpointError: See `step`.
        """
        self._refuse_unread()
        self._newest = step, metric
        self._finish()
        if step == self._saved:
            return True
        value = None if metric is None else float(metric)
        path = self.directory / (f"step_{step}.pth" if self._settings.kind == "full" else f"step_{step}")
        gathers = self._settings.kind == "full" and not self._settings.background
        extra = self._state.content(step, self._scope, whole=gathers)
        self._begun = time.monotonic()
        try:
            self._on_first(lambda files: files.announce(step, value), path)
            blocking = not self._settings.background
            pending = save_checkpoint(
                path, self._model, self._optimizer, kind=self._settings.kind, extra=extra, blocking=blocking
            )
        except (TargetExistsError, RunDirectoryError):
            raise
        except CheckpointError as error:
            self._failed(step, error)
            return False
        self._pending, self._saved = (step, pending), step
        self._retry_at = None
        if blocking:
            self._finish()
        return True

    def wait(self) -> None:
        """Wait until the save in the background is complete. Collective: every rank.

        Raises:
            CheckpointError: It failed, and ``raise_errors`` is set.
        """
        self._finish()

    def close(self) -> None:
        """Wait for the last save, and let other jobs use the directory. Collective: every rank.

        If the last save failed, the newest step is saved once more.

        Raises:
            CheckpointError: The second attempt also failed.
        """
        try:
            self._messages.receive()
            self._finish()
            if self._in_row and self._newest is not None:
                self.save(*self._newest)
            self._finish(last=True)
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error other ranks may be anywhere, or dead: nothing may wait for them.
        self.close() if kind is None else self._release()

    def _release(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.close()
        if self._fast is not None:
            self._fast.close()
        if self._signals is not None and not self._signals.asked:  # else it ends the process, if nothing else does
            self._signals.close()
            self._signals = None

    def _refuse_unread(self) -> None:
        if self._unread:
            raise RunDirectoryError(
                "The directory has checkpoints already. Call resume() before the first step, or choose a new directory "
                "for a new run.",
                file=str(self.directory),
            )

    def _finish(self, *, last: bool = False) -> None:
        """Take the outcome of the running save, and remove what need not be kept any more. Collective."""
        if self._pending is not None:
            (step, pending), self._pending = self._pending, None
            try:
                on_all_ranks(pending.settle, self._scope)
            except CheckpointError as error:
                self._saved = None
                self._failed(step, error)
            else:
                self._in_row, self._complete = 0, step
                self._on_first(self._retain, self.directory)
        if last and self._in_row:
            raise CheckpointError(
                f"The last {self._in_row} saves of this run failed; the log has the errors. Its newest steps are lost.",
                file=str(self.directory),
            )

    def _on_first(self, step: Callable[[RunDirectory | RunStore], None], path: Path) -> None:
        """Do something with the directory on the first rank; if it fails, raise on all. Collective."""

        def act() -> None:
            if self._files is not None:
                with as_checkpoint_error(path):
                    step(self._files)

        on_all_ranks(act, self._scope)

    def _retain(self, files: RunDirectory | RunStore) -> None:
        try:
            files.retain(self._settings.retention)
        except (OSError, CheckpointError) as error:  # an old checkpoint too many does no harm
            _log.warning("An old checkpoint cannot be removed: %s", error)

    def _failed(self, step: int, error: CheckpointError) -> None:
        self.failed_saves += 1
        if self._settings.raise_errors:
            raise error
        pause = min(2**self._in_row, _LONGEST_PAUSE)
        self._in_row += 1
        self._retry_at = step + pause
        if self._scope.is_first:
            _log.error("Step %d was not saved; step %d will be, or the next one. %s", step, self._retry_at, error)

    def _notice(self) -> Notice:
        """Return what this rank can tell the others at the end of a step."""
        passed = self._settings.have_passed(time.monotonic() - self._begun)
        self._asked_about = None if self._pending is None else self._pending[1]
        running = self._asked_about is not None and not self._asked_about.done()
        return Notice(passed and self._scope.is_first, running, self._signals is not None and self._signals.asked)

    def _tell(self) -> None:
        if self._settings.every_minutes is not None or self._pending is not None or self._signals is not None:
            self._messages.send(self._notice)

    def _hear(self) -> Notice:
        """Return what ranks know as of a step before; take the outcome of a save that has ended on all. Collective."""
        heard = self._messages.read(self._notice)
        if heard is None:
            return Notice()
        if self._pending is not None and self._pending[1] is self._asked_about and not heard.running:
            self._finish()
        return heard

    def _stop(self, step: int, metric: float | torch.Tensor | None, heard: Notice) -> None:
        """Save, and leave. Collective."""
        assert self._signals is not None
        self._signals.ask()  # a rank that got no signal has as little time as the others
        self.save(step, metric)
        self._finish()
        if self._scope.is_first:
            _log.warning(
                "Leaving with exit code %d, as rank %d was asked to. %s",
                self._settings.exit_code,
                heard.sender,
                self._what_is_kept(),
            )
        atexit.register(_end_groups)
        raise SystemExit(self._settings.exit_code)

    def _what_is_kept(self) -> str:
        """Say what is on disk, for a process that is about to end."""
        complete = self._complete or 0
        lost = 0 if self._newest is None else self._newest[0] - complete
        kept = "Nothing is saved" if self._complete is None else f"Step {self._complete} is complete on disk"
        return f"{kept}; {'no step' if not lost else 'one step' if lost == 1 else f'{lost} steps'} done since."


def _end_groups() -> None:
    """End gloo's threads: one that is busy when the interpreter ends makes the exit code that of SIGABRT."""
    if dist.is_initialized():
        dist.destroy_process_group()
