"""Finds the checkpoint that ``resume=True`` continues from: the newest complete one."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from mmengine.logging import print_log

from mmfsdp.checkpoint import open_layout
from mmfsdp.collective import on_all_ranks, scope_of, shared
from mmfsdp.errors import CheckpointError, CheckpointNotFoundError, FormatError
from mmfsdp_mmengine.processes.turns import firsts_of_machines

__all__ = ["find_latest_checkpoint"]

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
    if not dist.is_initialized():
        return _find(Path(path))
    scope = scope_of(None)
    found = shared(lambda: _find(Path(path)) if scope.is_first else None, scope)
    if found is None:
        firsts = firsts_of_machines(scope)
        on_all_ranks(lambda: _check_none(Path(path)) if scope.place in firsts else None, scope)
    return found


def _check_none(work_dir: Path) -> None:
    """Raise if this host has a checkpoint that the first rank does not see, as on disks that hosts do not share."""
    if (work_dir / "last_checkpoint").is_file() and (seen := _find(work_dir)) is not None:
        raise CheckpointNotFoundError(
            f"Host {socket.gethostname()!r} can resume from {seen}, but the first rank's host has no checkpoint in "
            f"{work_dir}. Put work_dir on a file system that all hosts share, or copy the checkpoint to that host.",
            file=seen,
        )


def _find(work_dir: Path) -> str | None:
    note = work_dir / "last_checkpoint"
    named = note.read_text().strip() if note.is_file() else ""
    if named and (trouble := _trouble(Path(named))) is None:
        return named
    folders = dict.fromkeys((work_dir, Path(named).parent)) if named else [work_dir]
    others = [place for place in _newest_first(folders) if str(place) != named]
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
