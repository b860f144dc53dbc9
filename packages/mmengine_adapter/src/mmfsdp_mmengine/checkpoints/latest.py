"""Which checkpoint ``resume=True`` goes on from: the newest one that is complete."""

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
from mmfsdp_mmengine.processes.machines import firsts_of_machines

__all__ = ["find_latest_checkpoint"]

_SUFFIXES = (".pth", ".pt")


def find_latest_checkpoint(path: str) -> str | None:
    """Return what ``last_checkpoint`` names, or if that cannot be resumed the newest checkpoint that can.

    Collective where ``torch.distributed`` runs: every rank, which all get the first one's answer.

    Args:
        path: The work directory.

    Returns:
        A file or directory, or None if there is nothing to resume.

    Raises:
        CheckpointNotFoundError: Another host than the first rank's has a checkpoint, which the first does not see.
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
    """Refuse to begin anew where the first rank does not see what was saved, as on disks that nodes do not share."""
    if (work_dir / "last_checkpoint").is_file() and (seen := _find(work_dir)) is not None:
        raise CheckpointNotFoundError(
            f"Host {socket.gethostname()!r} has {seen} to resume from, but the first rank's host has no checkpoint in "
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
        instead = f"{found}, the newest complete one, is resumed" if found else "No other one can be resumed"
        print_log(f"{because} {instead}.", logger="current", level=logging.WARNING)
    return None if found is None else str(found)


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    places = {place for folder in folders if folder.is_dir() for place in folder.iterdir() if place.suffix in _SUFFIXES}
    return sorted(places, key=lambda place: place.stat().st_mtime_ns, reverse=True)


def _trouble(place: Path) -> str | None:
    """Why a checkpoint cannot be read; None if it can, or if it is a directory of a kind that others read."""
    try:
        open_layout(place, trust=True)
    except CheckpointNotFoundError:
        return "there is nothing."
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
