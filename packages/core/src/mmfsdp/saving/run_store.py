"""Keeps the directory of a run in a store: like `RunDirectory`, where there are no locks and nothing can be renamed."""

from __future__ import annotations

import logging
from pathlib import Path

from mmfsdp.saving.run_directory import STEP_NAME, Retention, names_of_damaged, only_complete
from mmfsdp.saving.run_record import RECORD_NAME, checked_record, metrics_of, record_bytes, with_metric
from mmfsdp.saving.store_holder import StoreHolder
from mmfsdp.saving.stores import Store

__all__ = ["RunStore"]

_log = logging.getLogger("mmfsdp.saving")


class RunStore:
    """The directory of a run in a store. Not collective: for one rank.

    The directory is held by the job that opened it last. The job before it gets an error at its next save.

    Args:
        path: The directory.
        run: The name of the run, or ``None`` for any.
        model: Identifies the names and shapes of the model.

    Raises:
        RunDirectoryError: It belongs to another run or model.
        CheckpointError: The store cannot be read or written.
    """

    def __init__(self, path: Path, *, run: str | None, model: str) -> None:
        self.path = path
        self._store = Store(path)
        self._record = checked_record(self._store.read(RECORD_NAME), str(path), run=run, model=model)
        self._is_stored = False
        self._holder = StoreHolder(self._store)

    def close(self) -> None:
        """Do nothing: the next job may take the directory at any time."""

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return step and path of all checkpoints, the newest first; one without a manifest is none."""
        found = [(step, self.path / name) for step, name in self._steps() if self._store.is_complete(name)]
        return sorted(found, key=lambda item: -item[0])

    def complete(self) -> list[tuple[int, Path]]:
        """Return step and path of the complete checkpoints, the newest first; log why others are skipped."""
        return only_complete(self.checkpoints())

    def set_aside(self, after: int) -> None:
        """Move the checkpoints after a step, which could not be loaded, to ``step_8.damaged``."""
        for step, path in self.checkpoints():
            if step > after:
                taken = self._store.names()
                target = next(name for name in names_of_damaged(path.name) if name not in taken)
                self._store.move(path.name, target)
                _log.warning("Moved %r, which could not be loaded, to %r.", str(path), target)
        self._remove_remains()

    def announce(self, step: int, metric: float | None) -> None:
        """Record that the run saves a step, and how good it is, before the checkpoint is written.

        Raises:
            RunDirectoryError: Another job has opened the directory.
        """
        self._holder.check()
        changed = with_metric(self._record, step, metric)
        if changed != self._record or not self._is_stored:
            self._store.write(RECORD_NAME, record_bytes(changed))
            self._record, self._is_stored = changed, True

    def retain(self, retention: Retention) -> None:
        """Remove the checkpoints that need not be kept, and what killed saves have left. No save may be running."""
        paths = dict(self.checkpoints())
        for step in retention.to_remove(paths, metrics_of(self._record)):
            self._store.remove(paths[step].name)
        self._remove_remains()

    def _steps(self) -> list[tuple[int, str]]:
        matches = map(STEP_NAME.fullmatch, self._store.names())
        return [(int(match[1]), match[0]) for match in matches if match]

    def _remove_remains(self) -> None:
        for _, name in self._steps():
            if not self._store.is_complete(name):
                self._store.remove(name)
