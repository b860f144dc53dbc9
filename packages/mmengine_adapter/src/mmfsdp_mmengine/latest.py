"""Which checkpoint ``resume=True`` goes on from: the newest one that is complete."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from mmengine.logging import print_log

from mmfsdp.checkpoint import open_layout
from mmfsdp.collective import scope_of, shared
from mmfsdp.errors import CheckpointError, CheckpointNotFoundError, FormatError

__all__ = ["find_latest_checkpoint"]

_SUFFIXES = (".pth", ".pt")


def find_latest_checkpoint(path: str) -> str | None:
    """Return what ``last_checkpoint`` names, or if that cannot be resumed the newest checkpoint that can.

    Collective where ``torch.distributed`` runs: every rank, which all get the first one's answer.

    Args:
        path: The work directory.

    Returns:
        A file or directory, or None if there is nothing to resume.
    """
    if not dist.is_initialized():
        return _find(Path(path))
    [found] = shared(lambda: [_find(Path(path))] if dist.get_rank() == 0 else None, scope_of(None))
    return found


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
