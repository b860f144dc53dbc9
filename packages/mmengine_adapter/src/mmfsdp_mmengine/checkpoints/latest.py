"""Finds the checkpoint that ``resume=True`` continues from: the newest one that is complete and undamaged."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch.distributed as dist
from mmengine.logging import print_log

from mmfsdp.checkpoint import open_layout
from mmfsdp.collective import Scope, on_all_ranks, scope_of, shared
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
)
from mmfsdp.saving import names_of_damaged
from mmfsdp_mmengine.processes.turns import firsts_of_machines

__all__ = ["find_latest_checkpoint", "resume_newest"]

_SUFFIXES = (".pth", ".pt")


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
    return _find_together(Path(path), ())


def resume_newest(work_dir: str, resume: Callable[[str], None]) -> str | None:
    """Resume from the newest checkpoint that can be loaded. Collective: every rank.

    Those that are damaged are logged, and renamed once an older one is loaded: ``epoch_3.pth.damaged``.

    Args:
        work_dir: The work directory.
        resume: Resumes from a checkpoint. Collective.

    Returns:
        The checkpoint, or None if there is nothing to resume.

    Raises:
        IncompleteCheckpointError: There are checkpoints, and all of them are damaged; nothing is renamed.
    """
    damaged: list[str] = []
    while (found := _find_together(Path(work_dir), damaged)) is not None:
        try:
            resume(found)
        except (CorruptCheckpointError, IncompleteCheckpointError) as error:
            print_log(f"Skipped {found}, which is damaged: {error}", logger="current", level=logging.WARNING)
            damaged.append(found)
            continue
        _set_aside(damaged, Path(found), scope_of(None))
        return found
    _refuse_damaged(Path(work_dir), damaged, scope_of(None))
    return None


def _refuse_damaged(work_dir: Path, damaged: Collection[str], scope: Scope) -> None:
    """Raise if there are damaged checkpoints: the run would begin again unnoticed. Collective: every rank."""

    def check() -> None:
        places = _newest_first([work_dir, *[Path(found).parent for found in damaged]]) if scope.is_first else []
        for place in places:
            if str(place) in damaged or _is_damaged(place):
                raise IncompleteCheckpointError(
                    f"No checkpoint in {work_dir} can be loaded; the log names what is wrong. Restore one of them, or "
                    "set resume=False to train from the beginning.",
                    file=str(place),
                )

    on_all_ranks(check, scope)


def _set_aside(damaged: Collection[str], loaded: Path, scope: Scope) -> None:
    """Rename the checkpoints that are newer than what was loaded, and damaged. Collective: every rank."""

    def rename() -> None:
        newer = itertools.takewhile(lambda place: place != loaded, _newest_first([loaded.parent]))
        for place in [place for place in newer if str(place) in damaged or _is_damaged(place)]:
            targets = map(place.with_name, names_of_damaged(place.name))
            target = next(target for target in targets if not os.path.lexists(target))
            os.rename(place, target)
            print_log(f"Renamed {place} to {target.name}.", logger="current", level=logging.WARNING)

    on_all_ranks(rename if scope.is_first else lambda: None, scope)


def _is_damaged(place: Path) -> bool:
    try:
        open_layout(place, trust=True)
    except (CorruptCheckpointError, IncompleteCheckpointError):
        return True
    except CheckpointError:
        return False
    return False


def _find_together(path: Path, skipped: Collection[str]) -> str | None:
    if not dist.is_initialized():
        return _find(path, skipped)
    scope = scope_of(None)
    found = shared(lambda: _find(path, skipped) if scope.is_first else None, scope)
    if found is None and not skipped:
        firsts = firsts_of_machines(scope)
        on_all_ranks(lambda: _check_none(path) if scope.place in firsts else None, scope)
    return found


def _check_none(work_dir: Path) -> None:
    """Raise if this host has a checkpoint that the first rank does not see, as on disks that hosts do not share."""
    if (work_dir / "last_checkpoint").is_file() and (seen := _find(work_dir, ())) is not None:
        raise CheckpointNotFoundError(
            f"Host {socket.gethostname()!r} can resume from {seen}, but the first rank's host has no checkpoint in "
            f"{work_dir}. Put work_dir on a file system that all hosts share, or copy the checkpoint to that host.",
            file=seen,
        )


def _find(work_dir: Path, skipped: Collection[str]) -> str | None:
    note = work_dir / "last_checkpoint"
    named = note.read_text().strip() if note.is_file() else ""
    if named and (trouble := "it is damaged." if named in skipped else _trouble(Path(named))) is None:
        return named
    folders = dict.fromkeys((work_dir, Path(named).parent)) if named else [work_dir]
    others = [place for place in _newest_first(folders) if str(place) not in {named, *skipped}]
    found = next((place for place in others if _can_resume(place)), None)
    if named or found is not None:
        because = f"last_checkpoint names {named}: {trouble}" if named else f"{work_dir} has no last_checkpoint."
        instead = f"Resuming from {found}, the newest complete one" if found else "No other checkpoint can be resumed"
        print_log(f"{because} {instead}.", logger="current", level=logging.WARNING)
    return None if found is None else str(found)


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    places = {place for folder in folders if folder.is_dir() for place in folder.iterdir() if place.suffix in _SUFFIXES}
    return sorted(places, key=lambda place: place.stat().st_mtime_ns, reverse=True)


def _trouble(place: Path) -> str | None:
    """Return why a checkpoint cannot be read, or None if it can or if it is a directory in an unknown format."""
    try:
        open_layout(place, trust=True)
    except CheckpointNotFoundError:
        return "it does not exist."
    except FormatError as error:
        return None if place.is_dir() else error.message
    except CheckpointError as error:
        return error.message
    return None


def _can_resume(place: Path) -> bool:
    try:
        return {"meta", "optimizer"} <= {*open_layout(place, trust=True).top_level}
    except CheckpointError:
        return False
