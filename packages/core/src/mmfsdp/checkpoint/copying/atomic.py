"""Files and directories that appear at their final path complete, or not at all.

Everything is written to a hidden sibling of the target, synced, and renamed. The name of a sibling says which process
on which machine made it, so that what a killed run left behind can be told from what another run is writing now.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmfsdp.checkpoint.copying.open_files import refuse_special
from mmfsdp.errors import CheckpointError, CheckpointNotFoundError, closest

__all__ = [
    "TargetExistsError",
    "atomic_output",
    "commit",
    "discard",
    "located",
    "refuse_existing",
    "refuse_missing_parent",
    "temporary_sibling",
]

_PARTIAL = "mmfsdp-partial"
_REPLACED = "mmfsdp-replaced"
_LONGEST = 160  # bytes of the name in that of its sibling


class TargetExistsError(CheckpointError):
    """There is something at the target already, and overwriting was not asked for."""


def temporary_sibling(path: Path) -> Path:
    """Return a fresh hidden path beside ``path`` to write to; nothing is created.

    What an earlier run of this machine left for the same target is removed first if its process is gone. If that run
    died while it replaced a directory, the old directory is put back.

    Args:
        path: The target, a file or a directory to be.

    Raises:
        CheckpointNotFoundError: The directory that should hold the target does not exist.
        FormatError: The target is a pipe, a device or a socket.
    """
    refuse_missing_parent(path)
    path = located(path)
    refuse_special(path)
    _remove_stale(path)
    return _sibling(path, _PARTIAL)


def commit(temporary: Path, path: Path, *, overwrite: bool = False, fsync: bool = True) -> None:
    """Move what was written to ``temporary`` to its final path in one step.

    A file replaces a file in one rename. A directory cannot be replaced in one: the old one is moved aside, the new one
    moved in, and the old one removed only then.

    Args:
        temporary: The finished file or directory, a path of ``temporary_sibling``.
        path: The target.
        overwrite: Replace what is there.
        fsync: Wait until the data of every file, and the rename, are on disk.

    Raises:
        TargetExistsError: There is something at ``path`` and ``overwrite`` is false. ``temporary`` is left as it is.
    """
    path = located(path)
    if not overwrite:
        refuse_existing(path)
    if fsync:
        _sync_tree(temporary)
    aside: Path | None = None
    if os.path.lexists(path) and (path.is_dir() or temporary.is_dir()) and not path.is_symlink():
        aside = _sibling(path, _REPLACED)
        os.rename(path, aside)
    try:
        os.replace(temporary, path)
    except BaseException:
        if aside is not None:
            os.rename(aside, path)
        raise
    if fsync:
        _sync(path.parent)
    if aside is not None:
        discard(aside)


def discard(temporary: Path) -> None:
    """Remove a temporary file or directory; one that does not exist is fine."""
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary)
    else:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_output(path: Path, *, overwrite: bool = False, fsync: bool = True) -> Iterator[Path]:
    """Give a path to write to, which becomes ``path`` when the block ends without an error and vanishes otherwise.

    Args:
        path: The target. The block creates a file or a directory at the path that it is given.
        overwrite: Replace what is there.
        fsync: Wait until everything is on disk.

    Raises:
        TargetExistsError: There is something at ``path`` and ``overwrite`` is false; said before the block begins.
        CheckpointNotFoundError: The directory that should hold the target does not exist.
    """
    if not overwrite:
        refuse_existing(path)
    temporary = temporary_sibling(path)
    try:
        yield temporary
        commit(temporary, path, overwrite=overwrite, fsync=fsync)
    except BaseException:  # an interrupt must not leave a half-written file either
        discard(temporary)
        raise


def located(path: Path) -> Path:
    """Return the absolute path of a target: links on the way are followed, as the operating system does before ``..``.

    A link at the target itself is not: it is replaced, and what it points to stays.

    Args:
        path: The target; its directory should exist.
    """
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def refuse_missing_parent(path: Path) -> None:
    """Raise ``CheckpointNotFoundError`` if the directory that should hold a target does not exist."""
    if not path.parent.is_dir():
        raise CheckpointNotFoundError(
            f"{str(path)!r} cannot be written: the directory {str(path.parent)!r} does not exist. Create it first."
            + _nearest(path.parent),
            file=str(path),
        )


def refuse_existing(path: Path) -> None:
    """Raise ``TargetExistsError`` if there is something at a target already, ``FormatError`` if it is a device."""
    refuse_special(path)
    if os.path.lexists(path):
        kind = "directory" if path.is_dir() else "file"
        raise TargetExistsError(
            f"{str(path)!r} exists already. Pass overwrite=True (--force) to replace this {kind}, or choose another "
            "path.",
            file=str(path),
        )


def _machine() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{_stem(path)}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.{suffix}")


def _stem(path: Path) -> str:
    # The sibling of a long name must not be too long itself: file systems take 255 bytes.
    name = os.fsencode(path.name)
    if len(name) <= _LONGEST:
        return path.name
    return f"{os.fsdecode(name[: _LONGEST - 8]).encode('utf-8', 'ignore').decode()}{zlib.crc32(name):08x}"


def _remove_stale(path: Path) -> None:
    pattern = re.compile(re.escape(f".{_stem(path)}.") + rf"{_machine()}-(\d+)-[0-9a-f]{{8}}\.({_PARTIAL}|{_REPLACED})")
    for entry in list(path.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None or _is_alive(int(match[1])):
            continue
        if match[2] == _REPLACED and not os.path.lexists(path):
            os.rename(entry, path)
        else:
            discard(entry)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync_tree(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _sync_tree(child)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _nearest(path: Path) -> str:
    parent = path.parent
    return closest(path.name, [entry.name for entry in parent.iterdir()]) if parent.is_dir() else ""
