"""Finds the checkpoint that ``resume=True`` continues from: the newest one that is complete and undamaged."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from mmengine.logging import print_log

from mmfsdp import saving
from mmfsdp.checkpoint import open_layout
from mmfsdp.collective import Scope, on_all_ranks, scope_of, shared
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPermissionError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
)
from mmfsdp.saving import open_directory
from mmfsdp_mmengine.checkpoints.folders import folder_of, series
from mmfsdp_mmengine.checkpoints.live_content import read_content
from mmfsdp_mmengine.processes.turns import firsts_of_machines

__all__ = ["find_latest_checkpoint", "resume_newest"]


def find_latest_checkpoint(path: str) -> str | None:
    """Return the checkpoint that ``last_checkpoint`` names, or the newest one that can be resumed.

    Collective if ``torch.distributed`` is initialised: every rank, and all ranks get the first rank's answer.

    Args:
        path: The work directory.

    Returns:
        A file or directory, or None if there is nothing to resume.

    Raises:
        CheckpointNotFoundError: Another host has a checkpoint that the first rank's host does not see.
    """
    return _find_together(path, (), ())


def resume_newest(
    work_dir: str,
    resume: Callable[[str], None],
    folders: Sequence[str] = (),
    find_newer: Iterable[Callable[[int], str | None]] = (),
) -> str | None:
    """Resume from the newest checkpoint that can be loaded. Collective: every rank.

    Those that are damaged are logged, and renamed once an older one is loaded: ``epoch_3.pth.damaged``.

    Args:
        work_dir: The work directory.
        resume: Resumes from a checkpoint, or from what ``find_newer`` names. Collective.
        folders: More directories that may hold checkpoints of the run, as paths or URLs.
        find_newer: Each names what was saved elsewhere after some iterations, which comes first. Collective.

    Returns:
        The checkpoint, or None if there is nothing to resume.

    Raises:
        IncompleteCheckpointError: There are checkpoints, and all of them are damaged; nothing is renamed.
    """
    scope = scope_of(None)
    damaged: list[str] = []

    def load(found: str, *, is_newer: bool = False) -> str:
        resume(found)
        if not is_newer:
            _set_aside(damaged, found, scope)
        return found

    def candidates() -> Iterator[tuple[str, Callable[[], str]]]:
        found = _find_together(work_dir, folders, ())
        for find in find_newer:
            done = shared(lambda: _iterations(found) if scope.is_first and found else 0, scope) or 0
            if (newer := find(max(done, 0))) is not None:
                yield newer, partial(load, newer, is_newer=True)
        while found is not None:
            yield found, partial(load, found)
            damaged.append(found)
            found = _find_together(work_dir, folders, damaged)

    loaded = saving.resume_newest(candidates(), partial(print_log, logger="current", level=logging.WARNING))
    if loaded is None:
        _refuse_damaged([work_dir, *folders], damaged, scope)
    return loaded


def _refuse_damaged(folders: Sequence[str], damaged: Collection[str], scope: Scope) -> None:
    """Raise if there are damaged checkpoints: the run would begin again unnoticed. Collective: every rank."""

    def check() -> None:
        for path in _all_in([*folders, *map(folder_of, damaged)]) if scope.is_first else []:
            if path in damaged or _is_damaged(path):
                raise IncompleteCheckpointError(
                    f"No checkpoint in {folders[0]} can be loaded; the log names what is wrong. Restore one of them, "
                    "or set resume=False to train from the beginning.",
                    file=path,
                )

    on_all_ranks(check, scope)


def _set_aside(damaged: Collection[str], loaded: str, scope: Scope) -> None:
    """Rename the damaged checkpoints that would be newer than what was loaded. Collective: every rank."""

    def rename() -> None:
        folder = folder_of(loaded)
        for paths in series(folder):
            for path in paths:
                if path not in damaged and not _is_damaged(path):
                    break
                if (target := open_directory(folder).set_aside(path.rpartition("/")[2])) is not None:
                    print_log(f"Renamed {path} to {target}.", logger="current", level=logging.WARNING)

    on_all_ranks(rename if scope.is_first else lambda: None, scope)


def _is_damaged(path: str) -> bool:
    try:
        open_layout(path, trust=True)
    except (CorruptCheckpointError, IncompleteCheckpointError):
        return True
    except CheckpointError:
        return False
    return False


def _find_together(work_dir: str, folders: Sequence[str], skipped: Collection[str]) -> str | None:
    if not dist.is_initialized():
        return _find(work_dir, folders, skipped)
    scope = scope_of(None)
    found = shared(lambda: _find(work_dir, folders, skipped) if scope.is_first else None, scope)
    if found is None and not skipped:
        firsts = firsts_of_machines(scope)
        on_all_ranks(lambda: _check_none(work_dir) if scope.rank in firsts else None, scope)
    return found


def _check_none(work_dir: str) -> None:
    """Raise if this host has a checkpoint that the first rank does not see, as on disks that hosts do not share."""
    if _note(work_dir).is_file() and (seen := _find(work_dir, (), ())) is not None:
        raise CheckpointNotFoundError(
            f"Host {socket.gethostname()!r} can resume from {seen}, but the first rank's host has no checkpoint in "
            f"{work_dir}. Put work_dir on a file system that all hosts share, or copy the checkpoint to that host.",
            file=seen,
        )


def _note(work_dir: str) -> Path:
    return Path(work_dir, "last_checkpoint")


def _find(work_dir: str, folders: Sequence[str], skipped: Collection[str]) -> str | None:
    note = _note(work_dir)
    named = note.read_text().strip() if note.is_file() else ""
    if named and (trouble := "it is damaged." if named in skipped else _trouble(named)) is None:
        return named
    searched = [work_dir, *[folder_of(named)] * bool(named), *folders]
    found = _newest(searched, {named, *skipped})
    if named or found is not None:
        because = f"last_checkpoint names {named}: {trouble}" if named else f"{work_dir} has no last_checkpoint."
        instead = f"Resuming from {found}, the newest complete one" if found else "No other checkpoint can be resumed"
        print_log(f"{because} {instead}.", logger="current", level=logging.WARNING)
    return found


def _newest(folders: Sequence[str], without: Collection[str]) -> str | None:
    """Return the checkpoint that has done the most iterations, of those that can be resumed."""
    found = []
    for folder in dict.fromkeys(folders):
        for paths in series(folder):
            first = next((path for path in paths if path not in without and _can_resume(path)), None)
            found += [] if first is None else [first]
    return found[0] if len(found) == 1 else max(found, key=_iterations, default=None)


def _iterations(path: str) -> int:
    try:
        return int(read_content(path)["meta"]["iter"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return -1


def _all_in(folders: Iterable[str]) -> list[str]:
    return [path for folder in dict.fromkeys(folders) for paths in series(folder) for path in paths]


def _trouble(path: str) -> str | None:
    """Return why a checkpoint cannot be read, or None if it can or if it is a directory in an unknown format."""
    try:
        open_layout(path, trust=True)
    except CheckpointNotFoundError:
        return "it does not exist."
    except CheckpointPermissionError:
        raise  # resuming from an older one would lose its progress
    except FormatError as error:
        return None if Path(path).is_dir() else error.message
    except CheckpointError as error:
        return error.message
    return None


def _can_resume(path: str) -> bool:
    try:
        return {"meta", "optimizer"} <= {*open_layout(path, trust=True).top_level}
    except CheckpointPermissionError:
        raise
    except CheckpointError:
        return False
