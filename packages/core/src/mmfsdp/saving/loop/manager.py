"""Owns the checkpoints of a run in a training loop: when to save, which to keep, and where to resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mmfsdp.checkpoint.files.disk import checkpoint_path, refuse_empty
from mmfsdp.collective.scopes import new_scope
from mmfsdp.collective.steps import check_same_arguments, same_path
from mmfsdp.errors import ConfigError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.directory.held import HeldRun
from mmfsdp.saving.directory.record import identity_of
from mmfsdp.saving.directory.run import Retention
from mmfsdp.saving.loop.managed_run import ManagedRun
from mmfsdp.saving.loop.run_state import RunState, Stateful
from mmfsdp.saving.loop.save_loop import LoopSettings, SaveLoop
from mmfsdp.saving.nodes.tier import NodeTier
from mmfsdp.state.averaged_model import AveragedModel

__all__ = ["CheckpointManager"]


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
        keep_period: Also keep the checkpoint of every n-th step.
        keep_best: Also keep this many with the best metric, which `step` and `save` take.
        best_mode: ``'min'`` if small metrics are good, ``'max'`` if large ones are.
        kind: ``sharded``, ``local`` or ``full``: see `save_checkpoint`.
        background: Write while training continues, which waits only until each rank has copied its part.
        if_busy: What to do if the save before is still running when the next one is due: ``wait`` for it, or ``skip``
            the next one. `save` always waits.
        fast_directory: A directory on each node's own disk or in its memory, for frequent saves between those to
            ``directory``: each rank's file has a copy on the next node.
        fast_every_steps: Save there every n steps.
        schedulers: A learning rate scheduler, or several.
        scaler: A gradient scaler.
        averaged: Averaged weights: an `AveragedModel`, or a second sharded model.
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
        averaged: AveragedModel | nn.Module | None = None,
        state: Mapping[str, Stateful] | None = None,
        safe_globals: Sequence[Any] = (),
        run: str | None = None,
        raise_errors: bool = False,
        grace_seconds: float | None = 30.0,
        exit_code: int = 75,
    ) -> None:
        refuse_empty(directory)
        retention = Retention(max_to_keep, keep_period, keep_best, best_mode)
        if kind not in ("full", "local", "sharded"):
            raise ConfigError(f"kind must be 'full', 'local' or 'sharded', got {kind!r}.")
        settings = LoopSettings(
            every_steps=every_steps,
            every_minutes=every_minutes,
            background=background,
            if_busy=if_busy,
            is_tiered=fast_directory is not None,
            fast_every_steps=fast_every_steps,
            raise_errors=raise_errors,
            grace_seconds=grace_seconds,
            exit_code=exit_code,
        )
        sharded = find_sharded_model(model)
        # Messages of the steps must not mix with messages of saves, which may be running.
        scope = new_scope(sharded.mesh)
        listed = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
        named = {f"scheduler {number}": item for number, item in enumerate(listed)}
        named |= {} if scaler is None else {"scaler": scaler}
        states = RunState(model, scope, optimizer, averaged, named, dict(state or {}), safe_globals)
        given = {**vars(settings), "retention": retention, "kind": kind}
        given |= {"state": sorted([*named, *(state or {})]), "averaged": averaged is not None}
        check_same_arguments(scope, "CheckpointManager()", given)
        self.directory = checkpoint_path(same_path(directory, scope))
        identity = identity_of((param.fqn, param.shape) for param in sharded.plan.all_params())
        files = HeldRun(self.directory, scope, run=run, model=identity)
        self._run = ManagedRun(states, files, kind, not background, retention)
        if fast_directory is not None:
            try:
                where = Path(same_path(fast_directory, scope))
                self._run.fast = NodeTier(where, model, scope, run=run)
            except BaseException:
                self._run.close()
                raise
        self._loop = SaveLoop(settings, scope, self._run, self.directory)

    @property
    def failed_saves(self) -> int:
        """How many saves have failed so far."""
        return self._loop.ledger.num_failed

    def resume(self) -> int:
        """Load the newest checkpoint that is complete and undamaged; return how many steps it has done, or 0.

        Checkpoints that are incomplete or damaged are skipped, with a line in the log of ``mmfsdp.saving``, and are
        renamed once an older one is loaded: ``step_200.damaged``. Call it when everything that is saved exists, right
        before the loop. Collective: every rank.

        Raises:
            IncompleteCheckpointError: There are checkpoints, and none of them can be loaded.
            RunDirectoryError: The newest checkpoint is of another step than its name says; the run has other objects
                than the one that saved, or another class of optimizer or scheduler; or it needs as many ranks. As the
                next one, raised before anything is loaded.
            StateDictError: Names or shapes do not fit the model or optimizer.
        """
        if (found := self._run.resume_newest()) is None:
            return 0
        step, is_durable = found
        self._loop.ledger.resumed(step, saved=is_durable)
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
        self._run.files.refuse_unread()
        return self._loop.step(step, metric)

    def leave_if_asked(self, step: int) -> None:
        """After a signal save and leave, as `step` does; call it between the batches of an evaluation. Collective.

        Args:
            step: How many steps are done. The weights must be those after this step.

        Raises:
            LostRankError: Another rank is gone.
            SystemExit: See `step`.
        """
        self._run.files.refuse_unread()
        self._loop.leave_if_asked(step)

    def request_stop(self) -> None:
        """Make all ranks save and leave after their step, as SIGTERM does. Not collective: any rank, thread or handler.

        Use it where the notice comes by other ways than a signal, such as the metadata server of a cloud.

        Raises:
            ConfigError: ``grace_seconds`` is ``None``.
        """
        self._loop.stopping.ask()

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
        self._run.files.refuse_unread()
        return self._loop.save(step, metric)

    def wait(self) -> None:
        """Wait until the save in the background is complete. Collective: every rank.

        Raises:
            CheckpointError: It failed, and ``raise_errors`` is set.
        """
        self._loop.ledger.settle()

    def close(self) -> None:
        """Wait for the last save, and let other jobs use the directory. Collective: every rank.

        If the last save failed, the newest step is saved once more.

        Raises:
            CheckpointError: The second attempt also failed.
        """
        try:
            self._loop.close()
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
        self._run.close()
        self._loop.release()
