"""Lets ranks act on a directory together: the first one holds it, and all know what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.disk import checkpoint_path
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks, shared
from mmfsdp.errors import CheckpointError, RunDirectoryError
from mmfsdp.saving.directory.disk import Hold
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.directory.run import Retention, RunDirectory
from mmfsdp.saving.directory.store import open_directory

__all__ = ["HeldDirectory", "HeldRun"]

_log = logging.getLogger("mmfsdp.saving")


class HeldDirectory:
    """A directory that this job holds until it is closed or the job ends. Making one is collective: every rank.

    What killed saves have left there is removed.

    Args:
        path: A path, which is created if it is missing, or a URL in a store. The same on every rank.
        scope: The ranks.

    Raises:
        RunDirectoryError: A running job holds the directory on a disk; raised on every rank.
        CheckpointError: It cannot be created or written; raised on every rank.
    """

    def __init__(self, path: str | Path, scope: Scope) -> None:
        self._scope, self._is_store = scope, is_remote(target := checkpoint_path(path))

        def hold() -> Hold | None:
            with as_checkpoint_error(target):
                return open_directory(target).hold() if scope.is_first else None

        self._hold = on_all_ranks(hold, scope)

    def check(self) -> None:
        """Raise a ``RunDirectoryError`` if another job has opened the directory in a store. Collective: every rank."""
        if self._is_store:
            on_all_ranks(lambda: None if self._hold is None else self._hold.check(), self._scope)

    def close(self) -> None:
        """Let other jobs have the directory. Not collective."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.release()


class HeldRun:
    """The directory of a run, on a disk or in a store. Making one and all methods but `close` are collective.

    Args:
        path: The directory, the same on every rank.
        scope: The ranks.
        run: The name of the run, or ``None`` for any.
        model: Identifies the names and shapes of the model.

    Raises:
        RunDirectoryError: The directory belongs to another run or model, or a running job uses it.
        CheckpointError: It cannot be created or read.
    """

    def __init__(self, path: Path, scope: Scope, *, run: str | None, model: str) -> None:
        self.path, self._scope = path, scope

        def open_run() -> RunDirectory | None:
            with as_checkpoint_error(path):
                return RunDirectory(path, run=run, model=model) if scope.is_first else None

        self._files = on_all_ranks(open_run, scope)
        self.num_unread = shared(lambda: self._files and len(self._files.checkpoints()), scope) or 0
        """How many checkpoints there were, until the run has resumed."""

    def complete(self) -> list[tuple[int, Path]]:
        """Return step and path of the complete checkpoints, the newest first."""
        return shared(lambda: self._files.complete() if self._files else None, self._scope) or []

    def resumed(self, step: int, path: Path) -> None:
        """Go on after a step: what comes later could not be loaded, and is renamed.

        Args:
            step: The step.
            path: What was loaded, for messages.

        Raises:
            CheckpointError: The directory cannot be changed.
        """
        self._on_first(lambda files: files.set_aside(step), path)
        self.num_unread = 0

    def announce(self, step: int, metric: float | None, path: Path) -> None:
        """Record that a step is about to be saved, and how good it is.

        Raises:
            RunDirectoryError: Another job has opened the directory.
            CheckpointError: The directory cannot be written.
        """
        self._on_first(lambda files: files.announce(step, metric), path)

    def retain(self, retention: Retention) -> None:
        """Remove the checkpoints that need not be kept."""

        def act(files: RunDirectory) -> None:
            try:
                files.retain(retention)
            except (OSError, CheckpointError) as error:  # an old checkpoint too many does no harm
                _log.warning("An old checkpoint cannot be removed: %s", error)

        self._on_first(act, self.path)

    def refuse_unread(self) -> None:
        """Raise a ``RunDirectoryError`` if there are checkpoints, and the run has not resumed."""
        if self.num_unread:
            raise RunDirectoryError(
                "The directory has checkpoints already. Call resume() before the first step, or choose a new directory "
                "for a new run.",
                file=str(self.path),
            )

    def close(self) -> None:
        """Let other jobs use the directory. Not collective."""
        files, self._files = self._files, None
        if files is not None:
            files.close()

    def _on_first(self, step: Callable[[RunDirectory], None], path: Path) -> None:
        """Do something with the directory on the first rank; if it fails, raise on all."""

        def act() -> None:
            if self._files is not None:
                with as_checkpoint_error(path):
                    step(self._files)

        on_all_ranks(act, self._scope)
