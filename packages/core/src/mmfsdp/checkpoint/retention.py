"""Finds the latest complete checkpoint in a directory, and removes all but the last few."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from mmfsdp.checkpoint.files.disk import permission_errors, refuse_empty, remove
from mmfsdp.checkpoint.files.siblings import Kind, Lease, claim_of, new_token, sibling, targets_of
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest
from mmfsdp.errors import CheckpointError, CheckpointPermissionError, ConfigError

__all__ = ["check_complete", "latest_checkpoint", "remove_checkpoint", "remove_old_checkpoints", "remove_remains"]

_NUMBER = re.compile(r"\d+")


def latest_checkpoint(directory: str | os.PathLike[str], *, pattern: str = "*") -> Path | None:
    """Return the latest complete checkpoint in a directory, or ``None`` if there is none, or no such directory.

    The one with the highest number in its name is the latest: ``epoch_10.pth`` comes after ``epoch_9.pth``, and
    ``epoch_2_iter_5`` after ``epoch_2_iter_4``. Names without a number come before all others. Among these, and among
    equal numbers, the one that was modified last is the latest. A directory is complete if it holds the files of its
    manifest, and whatever else `open_layout` reads; sizes are compared and data is not. What a killed save left, and
    what is being written now, has another name.

    Not collective: one rank should ask, and tell the others.

    Args:
        directory: Where the checkpoints are.
        pattern: Names to look at, with ``*`` and ``?``: ``'iter_*'`` where there are ``epoch_*`` too.

    Returns:
        Its path. If a process died while it replaced that checkpoint, there may be nothing at the path, but
        `open_layout` finds what it left beside it.

    Raises:
        ConfigError: ``directory`` is empty.
        CheckpointPermissionError: The user of this process may not read the directory, or a later checkpoint.
    """
    refuse_empty(directory)
    return next(_complete(Path(directory), pattern), None)


def remove_old_checkpoints(
    directory: str | os.PathLike[str], *, keep: int, pattern: str | None = None
) -> tuple[Path, ...]:
    """Remove the complete checkpoints before the last few; return those that were removed.

    They are ordered as by `latest_checkpoint`. Incomplete and unfinished ones stay. A checkpoint leaves its
    path in one step.

    Not collective: for one rank to call, after a save is complete.

    Args:
        directory: Where the checkpoints are.
        keep: How many to keep, at least 1.
        pattern: Names to count and remove, with ``*`` and ``?``. By default those that differ from the latest one's in
            their numbers alone: where ``epoch_9.pth`` is the latest, neither ``best.pth`` nor ``best_epoch_3.pth``.

    Raises:
        ConfigError: ``keep`` is less than 1, or ``directory`` is empty.
        OSError: Something cannot be removed.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep} would remove the latest checkpoint; keep 1 or more.")
    refuse_empty(directory)
    directory = Path(directory)
    found = list(_complete(directory, pattern or "*"))
    if pattern is None:
        found = [path for path in found if _series(path) == _series(found[0]) != path.name]
    removed = tuple(path for path in found[keep:] if remove_checkpoint(path))
    remove_remains(directory)
    return removed


def check_complete(path: Path) -> None:
    """Raise unless a checkpoint is complete, as `latest_checkpoint` understands it. Not collective.

    Raises:
        CheckpointError: It is not.
        OSError: It cannot be read.
    """
    if (path / MANIFEST_NAME).exists():
        check_manifest(path)
    else:
        open_layout(path, trust=True)


def remove_checkpoint(path: Path) -> bool:
    """Move a checkpoint away from its path, for `remove_remains` to remove. Not collective.

    Returns:
        Whether this process did; not if the checkpoint is being rewritten, or is already gone.
    """
    claim = Lease.take(claim_of(path))
    if claim is None:
        return False
    try:
        os.rename(path, sibling(path, new_token(), Kind.REMOVED))
    except FileNotFoundError:
        return False
    finally:
        claim.release()
    return True


def remove_remains(directory: Path) -> None:
    """Remove the data of checkpoints that have left their paths, also if a killed process moved them. Not collective.

    Raises:
        OSError: Something cannot be removed.
    """
    if directory.is_dir():
        for entry in directory.iterdir():
            while entry.name.endswith(f".{Kind.REMOVED}") and os.path.lexists(entry):
                with contextlib.suppress(FileNotFoundError):  # another process is at it too
                    remove(entry)


def _complete(directory: Path, pattern: str) -> Iterator[Path]:
    """Yield the complete checkpoints in a directory, the latest first; each is checked only when it is its turn."""
    try:
        with permission_errors(directory):
            present = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    names = {name for name in present if not name.startswith(".")} | targets_of(directory)
    paths = [directory / name for name in names if fnmatchcase(name, pattern)]
    for path in sorted(paths, key=_order, reverse=True):
        if _is_complete(path):
            yield path


def _order(path: Path) -> tuple[list[int], int, str]:
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        modified = 0
    return [int(number) for number in _NUMBER.findall(path.stem)], modified, path.name


def _series(path: Path) -> str:
    return _NUMBER.sub("#", path.stem) + path.suffix


def _is_complete(path: Path) -> bool:
    try:
        with permission_errors(path):
            check_complete(path)
    except CheckpointPermissionError:
        if _NUMBER.search(path.stem):  # other directories, such as lost+found, are hardly checkpoints
            raise
        return False
    except (CheckpointError, OSError):
        return False
    return True
