"""Keeps the directory of a run: one job at a time, the checkpoints of one run only, and of these those to keep."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmfsdp.checkpoint.damage import not_permitted
from mmfsdp.checkpoint.retention import check_complete
from mmfsdp.errors import CheckpointError, ConfigError
from mmfsdp.saving.directory.record import RECORD_NAME, checked_record, metrics_of, record_bytes, with_metric
from mmfsdp.saving.directory.store import open_directory

__all__ = ["Retention", "RunDirectory", "check_count"]

_STEP = re.compile(r"step_(\d+)(\.pth)?")
_log = logging.getLogger("mmfsdp.saving")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run to keep; one that any of these rules keeps stays."""

    max_to_keep: int | None = None
    """The newest ones; all if ``None``."""
    keep_period: int | None = None
    """Those of every n-th step."""
    keep_best: int = 0
    """The best ones by their metric."""
    best_mode: Literal["min", "max"] = "min"
    """Whether small or large metrics are good."""

    def __post_init__(self) -> None:
        check_count("max_to_keep", self.max_to_keep)
        check_count("keep_period", self.keep_period)
        check_count("keep_best", self.keep_best, least=0)
        if self.max_to_keep is None and (self.keep_best or self.keep_period is not None):
            raise ConfigError("keep_best and keep_period add to max_to_keep, and without it every checkpoint is kept.")
        if self.best_mode not in ("min", "max"):
            raise ConfigError(f"best_mode must be 'min' or 'max', got {self.best_mode!r}.")

    def to_remove(self, steps: Iterable[int], metrics: Mapping[int, float]) -> list[int]:
        """Return the steps whose checkpoints no rule keeps. The newest one always stays."""
        ordered = sorted(steps)
        if self.max_to_keep is None:
            return []
        rated = [step for step in ordered if math.isfinite(metrics.get(step, math.nan))]
        sign = 1 if self.best_mode == "min" else -1
        best = sorted(rated, key=lambda step: (sign * metrics[step], -step))[: self.keep_best]
        periodic = [step for step in ordered if self.keep_period and step % self.keep_period == 0]
        kept = {*ordered[-self.max_to_keep :], *best, *periodic}
        return [step for step in ordered if step not in kept]


def check_count(name: str, value: int | None, *, least: int = 1) -> None:
    """Raise a ``ConfigError`` unless a setting is ``None`` or a whole number that is large enough."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{name}={value!r} is not a whole number of {least} or more.")


class RunDirectory:
    """The directory of a run, which one job holds until it closes it or ends. Not collective: for one rank.

    On a disk nobody else can take it. In a store the job that opens it last holds it.

    Args:
        path: The directory; it is created if it is missing.
        run: The name of the run, or ``None`` for any.
        model: Identifies the names and shapes of the model.

    Raises:
        RunDirectoryError: Another job holds the directory, or it belongs to another run or model.
        CheckpointError: What it says about its run cannot be read; or it is in a store that cannot be used.
        OSError: It cannot be created.
    """

    def __init__(self, path: Path, *, run: str | None, model: str) -> None:
        self._files = open_directory(path)

        def record() -> dict[str, Any]:
            return checked_record(self._files.read(RECORD_NAME), str(path), run=run, model=model)

        record()  # a directory of another run is left alone
        self._hold = self._files.hold()
        try:
            self._record = record()  # until now another job may have written it
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other jobs have the directory."""
        self._hold.release()

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return step and path of all checkpoints, the newest first; in a store one without a manifest is none."""
        found = [(_step_of(name), self._files.path / name) for name in self._files.checkpoints(_STEP.fullmatch)]
        return sorted(found, key=lambda item: (item[0], item[1].name), reverse=True)

    def complete(self) -> list[tuple[int, Path]]:
        """Return step and path of the complete checkpoints, the newest first; log why others are skipped.

        Raises:
            CheckpointPermissionError: The user of this process may not read one that is newer than those.
        """
        found: list[tuple[int, Path]] = []
        for step, path in self.checkpoints():
            try:
                check_complete(path)
            except PermissionError as error:
                if not found:  # resuming from an older one would lose its progress
                    raise error if isinstance(error, CheckpointError) else not_permitted(path, error) from error
                _log.warning("Skipped the checkpoint %r, which cannot be read: %s", str(path), error)
            except (CheckpointError, OSError) as error:
                _log.warning("Skipped the checkpoint %r, which is not complete: %s", str(path), error)
            else:
                found.append((step, path))
        return found

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints after a step, which could not be loaded: ``step_8.damaged``. Nothing is removed."""
        for step, path in self.checkpoints():
            if step > after and (target := self._files.set_aside(path.name)) is not None:
                _log.warning("Renamed %r, which could not be loaded, to %r.", str(path), target)
        self._files.remove_remains(_STEP.fullmatch)

    def announce(self, step: int, metric: float | None) -> None:
        """Record that the run saves a step, and how good it is, before the checkpoint is written.

        Raises:
            RunDirectoryError: Another job has opened the directory, in a store.
        """
        self._hold.check()
        changed = with_metric(self._record, step, metric)
        if changed != self._record or self._files.read(RECORD_NAME) is None:
            self._files.write(RECORD_NAME, record_bytes(changed))
            self._record = changed

    def retain(self, retention: Retention) -> None:
        """Remove the checkpoints that need not be kept, and what killed saves have left. No save may be running."""
        paths = dict(self.checkpoints())
        for step in retention.to_remove(paths, metrics_of(self._record)):
            self._files.remove(paths[step].name)
        self._files.remove_remains(_STEP.fullmatch)


def _step_of(name: str) -> int:
    match = _STEP.fullmatch(name)
    assert match is not None
    return int(match[1])
