"""Publishes files and directories at their final path: complete, or not at all.

Everything is written to a hidden sibling of the target, synced, and renamed to the target in one step. The next process
that writes the same target removes or completes what a killed process left behind (see ``siblings``).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmfsdp.basics.arguments import argument
from mmfsdp.checkpoint.files.disk import exchange, located, refuse_missing_parent, remove, rename_new, sync
from mmfsdp.checkpoint.files.siblings import (
    Kind,
    Lease,
    adopt,
    claim_of,
    new_token,
    remove_leftovers,
    sibling,
    token_of,
    writer,
)
from mmfsdp.checkpoint.integrity import refuse_special
from mmfsdp.errors import CheckpointError

__all__ = [
    "TargetExistsError",
    "atomic_output",
    "commit",
    "discard",
    "journal_of",
    "leave",
    "refuse_existing",
    "refuse_other_content",
    "temporary_sibling",
]

# Files in directories of checkpoints that are written here or by Hugging Face's libraries. Others, such as
# training_args.bin or adapter_model.safetensors, are not what the new checkpoint takes the place of.
_OF_CHECKPOINTS = re.compile(
    r"manifest\.json|\.metadata|.+\.distcp|rank\d+\.pth|\..+\.mmfsdp-\w+"
    r"|(?:(?:diffusion_)?pytorch_model|model|shard-\d+-model)\b.*\.(?:safetensors|bin)(?:\.index\.json)?"
)

_held: dict[Path, list[Lease]] = {}
"""The leases of the targets that this process is writing, by temporary path."""


class TargetExistsError(CheckpointError):
    """The target exists, or another process is writing it, and overwriting was not asked for."""


def temporary_sibling(path: Path, *, exclusive: bool = False, resume: bool = False) -> Path:
    """Return a fresh hidden path beside ``path`` to write to; nothing is created there.

    Until ``commit`` or ``discard`` is called with it, or this process dies, other processes know that it is being
    written. Leftovers of dead processes for the same target are removed first. If one of them died while it replaced
    the target, the newest complete checkpoint is moved back to the target.

    Args:
        path: The target, which will be a file or a directory.
        exclusive: Fail at once if the target exists or another process is writing it.
        resume: Give the path of an unfinished target that a dead process left, if there is one with a journal.

    Raises:
        CheckpointNotFoundError: The directory that should hold the target does not exist.
        FormatError: The target is a pipe, a device or a socket.
        TargetExistsError: ``exclusive`` is true, and the target exists or another process is writing it.
    """
    refuse_missing_parent(path)
    given, path = path, located(path)
    refuse_special(path)
    token = new_token()
    temporary = sibling(path, token, Kind.PARTIAL)
    leases: list[Lease] = []
    try:
        claim = Lease.take(claim_of(path))
        if claim is not None:
            leases.append(claim)
        elif exclusive:
            raise _being_written(given, claim_of(path))
        own = Lease.take(sibling(path, token, Kind.LEASE), wait=True, guarded=temporary)
        if own is not None:
            leases.append(own)
            if resume:
                adopt(path, own, token)
            remove_leftovers(path, own)
        if exclusive:
            refuse_existing(given)
    except BaseException:
        _release(leases)
        raise
    _held[temporary] = leases
    return temporary


def commit(temporary: Path, path: Path, *, overwrite: bool = False, fsync: bool = True) -> None:
    """Move a finished file or directory to its final path in one step.

    If there was something complete at ``path`` before, there is at every instant: the old and the new one are
    exchanged, and only then is the old one removed. Where the file system cannot exchange directories, the old one is
    moved aside first. If this process dies at that moment, ``open_layout`` and the next save find what it left.

    Args:
        temporary: The finished file or directory, a path of ``temporary_sibling``.
        path: The target.
        overwrite: Replace an existing target. Otherwise nothing is ever replaced, even if it appeared just now.
        fsync: Wait until the data of every file, and the rename, are on disk.

    Raises:
        TargetExistsError: ``path`` exists and ``overwrite`` is false. ``temporary`` is left unchanged.
    """
    given, path = path, located(path)
    if not overwrite:
        refuse_existing(given)
    if fsync:
        _sync_tree(temporary)
    old: Path | None = None
    if overwrite:
        old = _replace(temporary, path)
    else:
        try:
            rename_new(temporary, path)
        except FileExistsError as error:
            raise _exists(given) from error
    if fsync:
        sync(path.parent)
    if old is not None:
        remove(old)
    _release(_held.pop(temporary, []))


def _replace(temporary: Path, path: Path) -> Path | None:
    """Move a file or directory to a path. Return where the old one is now, or ``None`` if there is none."""
    while True:
        try:
            if not os.path.lexists(path) or not (temporary.is_dir() or _is_directory(path)):
                os.replace(temporary, path)
                return None
            return temporary if exchange(temporary, path) else _moved_aside(temporary, path)
        except OSError as error:
            # Another process replaces the same target: it appeared or vanished in the meantime.
            came = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
            if not os.path.lexists(temporary) or not (came or isinstance(error, FileNotFoundError)):
                raise


def _moved_aside(temporary: Path, path: Path) -> Path:
    aside = sibling(path, token_of(temporary), Kind.REPLACED)
    os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except BaseException:
        rename_new(aside, path)
        raise
    return aside


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def discard(temporary: Path) -> None:
    """Remove a temporary file or directory, if it exists, and release the target."""
    try:
        remove(temporary)
    finally:
        _release(_held.pop(temporary, []))


def journal_of(temporary: Path) -> Path:
    """Return the path of the journal of a temporary file or directory."""
    return temporary.with_name(temporary.name.removesuffix(Kind.PARTIAL) + Kind.JOURNAL)


def leave(temporary: Path) -> None:
    """Leave a temporary file or directory and its journal for the next process, as if this one had died."""
    leases = _held.pop(temporary, [])
    while leases:
        lease = leases.pop()
        if lease.guarded is None:
            lease.release()
        else:
            lease.abandon()


def _release(leases: list[Lease]) -> None:
    while leases:
        leases.pop().release()


@contextmanager
def atomic_output(path: Path, *, overwrite: bool = False, fsync: bool = True) -> Iterator[Path]:
    """Yield a temporary path, which becomes ``path`` if the block ends without an error and is removed otherwise.

    Args:
        path: The target. The block creates a file or a directory at the temporary path.
        overwrite: Replace an existing target.
        fsync: Wait until everything is on disk.

    Raises:
        TargetExistsError: ``overwrite`` is false, and ``path`` exists or another process is writing it. Raised before
            the block begins.
        CheckpointNotFoundError: The directory that should hold the target does not exist.
    """
    temporary = temporary_sibling(path, exclusive=not overwrite)
    try:
        yield temporary
        commit(temporary, path, overwrite=overwrite, fsync=fsync)
    except BaseException:  # an interrupt must not leave a half-written file either
        discard(temporary)
        raise


def refuse_existing(path: Path) -> None:
    """Raise ``TargetExistsError`` if a target exists, ``FormatError`` if it is a device."""
    refuse_special(path)
    if os.path.lexists(path):
        raise _exists(path)


def refuse_other_content(target: Path, kept: Container[str] = ()) -> None:
    """Raise if replacing a directory would remove something that is not part of a checkpoint.

    Args:
        target: What will be replaced, if it is a directory.
        kept: Names of files that the new directory will have, too.

    Raises:
        CheckpointError: There is such a file or directory.
    """
    if not target.is_dir() or target.is_symlink():
        return
    foreign = sorted(
        entry.name
        for entry in target.iterdir()
        if entry.is_dir() or not (entry.name in kept or _OF_CHECKPOINTS.fullmatch(entry.name))
    )
    if foreign:
        raise CheckpointError(
            f"The directory {str(target)!r} is not replaced: it also holds {foreign[0]!r}, which is not part of a "
            "checkpoint. Remove the directory yourself, or choose another path.",
            file=str(target),
        )


def _exists(path: Path) -> TargetExistsError:
    kind = "directory" if path.is_dir() else "file"
    return TargetExistsError(
        f"{str(path)!r} exists already. Pass {argument('overwrite', True)} to replace this {kind}, or choose another "
        "path.",
        file=str(path),
    )


def _being_written(path: Path, claim: Path) -> TargetExistsError:
    found = writer(claim)
    who = f"process {found['pid']} on {found['host']}" if {"pid", "host"} <= found.keys() else "its claim is locked"
    return TargetExistsError(
        f"{str(path)!r} is being written by another process ({who}). Wait for it, pass {argument('overwrite', True)} "
        "to replace what it writes, or choose another path.",
        file=str(path),
    )


def _sync_tree(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _sync_tree(child)
    sync(path)
