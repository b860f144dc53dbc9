"""Keeps the directory of a run: one job at a time, the checkpoints of one run only, and of these those to keep."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmfsdp.checkpoint.damage import not_permitted
from mmfsdp.checkpoint.files.atomic import atomic_output
from mmfsdp.checkpoint.files.siblings import Lease, remove_all_leftovers, targets_of, writer
from mmfsdp.checkpoint.retention import check_complete, remove_checkpoint, remove_remains
from mmfsdp.errors import CheckpointError, ConfigError, RunDirectoryError
from mmfsdp.saving.run_record import RECORD_NAME, checked_record, metrics_of, record_bytes, with_metric

__all__ = [
    "LEASE_NAME",
    "STEP_NAME",
    "Retention",
    "RunDirectory",
    "check_count",
    "names_of_damaged",
    "only_complete",
    "take_directory",
]

LEASE_NAME = ".mmfsdp-run-lease"
STEP_NAME = re.compile(r"step_(\d+)(\.pth)?")
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

    Args:
        path: The directory; it is created if it is missing.
        run: The name of the run, or ``None`` for any.
        model: Identifies the names and shapes of the model.

    Raises:
        RunDirectoryError: Another job holds the directory, or it belongs to another run or model.
        CheckpointError: What it says about its run cannot be read.
        OSError: It cannot be created.
    """

    def __init__(self, path: Path, *, run: str | None, model: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lease = take_directory(path / LEASE_NAME)
        try:
            file = path / RECORD_NAME
            data = file.read_bytes() if file.exists() else None
            self._record = checked_record(data, str(path), run=run, model=model)
            remove_all_leftovers(path, self._lease)  # of saves at steps that may never be saved again
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other jobs have the directory."""
        self._lease.release()

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return step and path of all checkpoints, complete or not, the newest first."""
        names = {*os.listdir(self.path), *targets_of(self.path)}
        found = [(int(match[1]), self.path / match[0]) for match in map(STEP_NAME.fullmatch, names) if match]
        return sorted(found, reverse=True)

    def complete(self) -> list[tuple[int, Path]]:
        """Return step and path of the complete checkpoints, the newest first; log why others are skipped."""
        return only_complete(self.checkpoints())

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints after a step, which could not be loaded: ``step_8.damaged``. Nothing is removed."""
        for step, path in self.checkpoints():
            if step > after and os.path.lexists(path):
                targets = map(path.with_name, names_of_damaged(path.name))
                target = next(target for target in targets if not os.path.lexists(target))
                os.rename(path, target)
                _log.warning("Renamed %r, which could not be loaded, to %r.", str(path), target.name)

    def announce(self, step: int, metric: float | None) -> None:
        """Record that the run saves a step, and how good it is, before the checkpoint is written."""
        changed = with_metric(self._record, step, metric)
        target = self.path / RECORD_NAME
        if changed != self._record or not target.exists():
            self.path.mkdir(parents=True, exist_ok=True)  # it may have been lost since the run began
            with atomic_output(target, overwrite=True) as temporary:
                temporary.write_bytes(record_bytes(changed))
            self._record = changed

    def retain(self, retention: Retention) -> None:
        """Remove the checkpoints that need not be kept."""
        paths = dict(self.checkpoints())
        for step in retention.to_remove(paths, metrics_of(self._record)):
            remove_checkpoint(paths[step])
        remove_remains(self.path)


def only_complete(checkpoints: Iterable[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Return those of some checkpoints, with their steps, that are complete; log why others are skipped.

    Args:
        checkpoints: Steps and paths, the newest first.

    Raises:
        CheckpointPermissionError: The user of this process may not read one that is newer than those.
    """
    found: list[tuple[int, Path]] = []
    for step, path in checkpoints:
        try:
            check_complete(path)
        except PermissionError as error:
            if not found:  # to go on from an older one would lose what is there
                raise error if isinstance(error, CheckpointError) else not_permitted(path, error) from error
            _log.warning("Skipped the checkpoint %r, which cannot be read: %s", str(path), error)
        except (CheckpointError, OSError) as error:
            _log.warning("Skipped the checkpoint %r, which is not complete: %s", str(path), error)
        else:
            found.append((step, path))
    return found


def names_of_damaged(name: str) -> Iterator[str]:
    """Yield ``step_8.damaged``, ``step_8.damaged-2``, ``step_8.damaged-3``, ..."""
    yield f"{name}.damaged"
    for number in itertools.count(2):
        yield f"{name}.damaged-{number}"


def take_directory(path: Path) -> Lease:
    """Hold the directory, or say which process does."""
    lease = Lease.take(path)
    if lease is None:
        holder = writer(path)
        raise RunDirectoryError(
            f"Process {holder.get('pid', '?')} on host {holder.get('host', '?')!r} is using the directory of this run. "
            "Wait until it and the processes forked from it have ended, or end them; if it is another run, choose "
            "another directory.",
            file=str(path.parent),
        )
    return lease
