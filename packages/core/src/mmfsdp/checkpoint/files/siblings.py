"""Names the hidden files beside a target while it is written, moves them, and cleans up after killed processes.

For a target ``a`` they are ``.a.TOKEN.mmfsdp-partial``, what is written; ``.a.TOKEN.mmfsdp-replaced``, what was there
before, where a directory cannot be exchanged in one step; ``.a.TOKEN.mmfsdp-lease``, which the process that writes
keeps locked; ``.a.mmfsdp-claim``, which one process keeps locked that relies on finding nothing at the target; and
``.a.TOKEN.mmfsdp-removed``, an old checkpoint that is about to go.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.machines import boot_id, close_in_children, has_ended, process_id
from mmfsdp.checkpoint.files.disk import remove, rename_new
from mmfsdp.checkpoint.manifest import check_manifest
from mmfsdp.errors import CheckpointError

__all__ = [
    "ABANDONED",
    "Kind",
    "Lease",
    "adopt",
    "claim_of",
    "interrupted",
    "new_token",
    "remove_all_leftovers",
    "remove_leftovers",
    "sibling",
    "targets_of",
    "token_of",
    "writer",
]

_LONGEST = 160  # bytes of the target's name in the name of its sibling


class Kind(enum.StrEnum):
    """The kind of a sibling."""

    PARTIAL = "mmfsdp-partial"
    REPLACED = "mmfsdp-replaced"
    LEASE = "mmfsdp-lease"
    REMOVED = "mmfsdp-removed"
    JOURNAL = "mmfsdp-journal"


class _Sibling(NamedTuple):
    path: Path
    token: str
    kind: Kind


def new_token() -> str:
    """Return a token that identifies one attempt to write a target."""
    return os.urandom(8).hex()


def sibling(path: Path, token: str, kind: Kind) -> Path:
    """Return the path of a sibling of a target."""
    return path.with_name(f".{_stem(path)}.{token}.{kind}")


_CLAIM = re.compile(r"\..+\.mmfsdp-claim")


def claim_of(path: Path) -> Path:
    """Return the path of the claim of a target."""
    return path.with_name(f".{_stem(path)}.mmfsdp-claim")


def token_of(temporary: Path) -> str:
    """Return the token in the name of a sibling; a fresh one for any other name."""
    parts = temporary.name.split(".")
    return parts[-2] if parts[-1] in tuple(Kind) and len(parts) > 2 else new_token()


def interrupted(path: Path) -> Path | None:
    """Return the newest complete checkpoint that an interrupted replacement left beside a target that is missing.

    Return ``None`` if the target exists or nothing was left.
    """
    if is_remote(path) or os.path.lexists(path) or path.name in ("", ".."):
        return None
    found = list(_siblings(path))
    moved = {entry.token for entry in found if entry.kind is Kind.REPLACED}
    # A partial directory whose target was moved aside was finished: only its last rename is missing.
    whole = [
        entry.path
        for entry in found
        if entry.kind is Kind.REPLACED
        or (entry.kind is Kind.PARTIAL and entry.token in moved and _is_whole(entry.path))
    ]
    return max(whole, key=_finished, default=None)


def targets_of(directory: Path) -> set[str]:
    """Return the names of the targets in a directory whose replacement was interrupted."""
    pattern = re.compile(rf"\.(.+)\.[0-9a-f-]+\.{Kind.REPLACED}")
    names = {match[1] for name in os.listdir(directory) if (match := pattern.fullmatch(name))}
    return {name for name in names if interrupted(directory / name) is not None}


def adopt(path: Path, own: Lease, token: str) -> None:
    """Take over the newest unfinished target that a dead process left with its journal.

    Args:
        path: The target, as ``located`` returns it.
        own: The lease of this process.
        token: The token of this process, under which both are found afterwards.
    """
    left = []
    for entry in _siblings(path):
        partial = sibling(path, entry.token, Kind.PARTIAL)
        lease = sibling(path, entry.token, Kind.LEASE)
        if entry.kind is Kind.JOURNAL and os.path.lexists(partial) and not _is_alive(lease, partial, own):
            left.append((_finished(entry.path), entry.path, partial))
    if left:
        _, journal, partial = max(left)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            os.rename(partial, sibling(path, token, Kind.PARTIAL))
            os.rename(journal, sibling(path, token, Kind.JOURNAL))


def remove_leftovers(path: Path, own: Lease) -> None:
    """Remove what dead processes left beside a target. If one died while it replaced the target, restore the target.

    Files that another process may still be writing stay, and so do files that cannot be removed.

    Args:
        path: The target, as ``located`` returns it.
        own: The lease of this process.
    """
    found = list(_siblings(path))
    guarded = {entry.token for entry in found if entry.kind is not Kind.LEASE}
    dead = []
    for entry in found:
        lease = sibling(path, entry.token, Kind.LEASE)
        if not _is_alive(lease, entry.path if entry.token in guarded else None, own):
            dead.append(entry)
    restored = interrupted(path)
    if restored is not None and restored in {entry.path for entry in dead}:
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process was first
            rename_new(restored, path)
    for entry in sorted(dead, key=lambda entry: entry.kind is Kind.LEASE):
        if entry.path != own.path:
            with contextlib.suppress(OSError):
                remove(entry.path)


def remove_all_leftovers(directory: Path, own: Lease) -> None:
    """Do what `remove_leftovers` does for each target in a directory, whether it is written again or not.

    Args:
        directory: The directory.
        own: A lease that was taken just now in this directory.
    """
    pattern = re.compile(rf"\.(.+)\.[0-9a-f-]+\.(?:{'|'.join(Kind)})")
    for name in sorted({match[1] for name in os.listdir(directory) if (match := pattern.fullmatch(name))}):
        remove_leftovers(directory / name, own)
    for name in os.listdir(directory):
        # A process that died right after it had published a target leaves its claim alone.
        if _CLAIM.fullmatch(name) and (claim := Lease.take(directory / name)) is not None:
            claim.release()


def _siblings(path: Path) -> Iterator[_Sibling]:
    pattern = re.compile(re.escape(f".{_stem(path)}.") + rf"([0-9a-f-]+)\.({'|'.join(Kind)})")
    if not path.parent.is_dir():
        return
    for name in sorted(os.listdir(path.parent)):
        if match := pattern.fullmatch(name):
            yield _Sibling(path.with_name(name), match[1], Kind(match[2]))


def _is_whole(path: Path) -> bool:
    if not path.is_dir():
        return True
    try:
        check_manifest(path)
    except (CheckpointError, OSError):
        return False
    return True


def _finished(path: Path) -> float:
    """Return when something was written: the time of its newest file."""
    try:
        entries = [*path.iterdir()] if path.is_dir() else []
        return max(entry.stat().st_mtime for entry in (entries or [path]))
    except OSError:
        return 0.0


def _stem(path: Path) -> str:
    # The sibling of a long name must not be too long itself: file systems take 255 bytes.
    name = os.fsencode(path.name)
    if len(name) <= _LONGEST:
        return path.name
    return f"{os.fsdecode(name[: _LONGEST - 8]).encode('utf-8', 'ignore').decode()}{zlib.crc32(name):08x}"


ABANDONED = 3600
"""Seconds without a change after which a checkpoint that another machine may be writing counts as abandoned."""


class Lease:
    """A file that this process holds locked until it releases the lease or ends."""

    __slots__ = ("__weakref__", "_descriptor", "_owner", "guarded", "path")

    def __init__(self, path: Path, guarded: Path | None) -> None:
        self.path = path
        self.guarded = guarded
        self._owner = os.getpid()  # a child that a library forked has the lock too, and must not release it
        self._descriptor: int | None = None

    @classmethod
    def take(cls, path: Path, *, wait: bool = False, guarded: Path | None = None) -> Lease | None:
        """Create a file, or take over the file of a dead process, and hold it locked.

        Where the file system has no locks, every process gets the lease. A process that has ended holds nothing, even
        if one that was forked from it still has its lock.

        Args:
            path: The file.
            wait: Wait for the process that holds it; otherwise return ``None`` if another process does.
            guarded: The file or directory that the lease is about. If it exists when the process ends, the lease file
                stays, as if the process had died.
        """
        lease = cls(path, guarded)
        _release_at_exit()
        _all.add(lease)  # before the file exists: an interrupt may come at any moment
        close_in_children(lease)
        while True:
            # Known to the lease before it is locked: after an interrupt, nobody else could close and so unlock it.
            lease._descriptor = descriptor = _opened(path)
            locked = _locked(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)) is not False
            if locked and _is_at(descriptor, path):  # and was not released, and removed, in the meantime
                _sign(descriptor)
                return lease
            freed = not locked and _remove_inherited(path, descriptor)
            lease._descriptor = None
            os.close(descriptor)
            if not locked and not freed:
                _all.discard(lease)
                return None

    def release(self) -> None:
        """Remove the file and unlock it, unless another process has taken it."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                if self._descriptor is None:  # an interrupt came while it was taken
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                locked = _locked(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) is not False
                if locked and _is_at(self._descriptor, self.path):
                    self.path.unlink()
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        _all.discard(self)

    def abandon(self) -> None:
        """Unlock the file and leave it, as if the process had died."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        _all.discard(self)

    def close_in_child(self) -> None:
        """Leave the lease to the process that this one was forked from."""
        self.abandon()

    def age_of(self, path: Path) -> float:
        """Return the seconds between the last change in a file or directory and this lease.

        The file system gives both times, so that the clocks of machines need not agree.
        """
        assert self._descriptor is not None
        return os.fstat(self._descriptor).st_mtime - max(_changes(path), default=0.0)


def _is_alive(lease: Path, held: Path | None, own: Lease) -> bool:
    """Tell whether the process that holds a lease may still be writing: ``False`` only if it is certainly not.

    Args:
        lease: The lease of another process. Without one, age alone decides.
        held: The file or directory that the process writes; ``None`` if there is none.
        own: A lease taken just now in the same directory, which gives the time of the file system.
    """
    try:
        descriptor = os.open(lease, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return held is not None and own.age_of(held) < ABANDONED
    try:
        free = _locked(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if free is False:
            return not _is_inherited(descriptor)
        if free and (held is None or writer(lease).get("machine") == _machine(descriptor)):
            return False
    finally:
        os.close(descriptor)
    return min(own.age_of(path) for path in (held, lease) if path is not None) < ABANDONED


def _is_inherited(descriptor: int) -> bool:
    """Tell whether a lease that is locked was taken by a process of this machine that has ended."""
    try:
        signed = json.loads(os.pread(descriptor, 4096, 0))
        return signed["machine"] == _machine(descriptor) and has_ended(signed["process"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _remove_inherited(path: Path, descriptor: int) -> bool:
    """Remove the file of a lease whose process has ended while a fork of it has the lock. Return whether it is gone."""
    if not _is_inherited(descriptor):
        return False
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # One at a time: otherwise this could remove the file that another process has just made in its stead.
        if not _locked(directory, fcntl.LOCK_EX):
            return False
        if _is_at(descriptor, path):
            path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(directory)


def writer(lease: Path) -> dict[str, Any]:
    """Return ``machine``, ``host`` and ``pid`` of the process that holds a lease; empty if it cannot be read."""
    try:
        content = json.loads(lease.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _machine(descriptor: int) -> str:
    """Return an identifier of this machine since it was started, and of the mount that holds a file.

    Containers on one machine are the same machine.
    """
    return f"{boot_id() or os.uname().nodename}/{os.fstat(descriptor).st_dev}"


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except PermissionError:  # of another user, who may be dead
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(path, flags, 0o666)  # there is none: the directory is what may not be written to


def _sign(descriptor: int) -> None:
    own = {"machine": _machine(descriptor), "host": os.uname().nodename, "pid": os.getpid(), "process": process_id()}
    text = json.dumps(own)
    with contextlib.suppress(OSError):  # it may be open for reading only
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _locked(descriptor: int, operation: int) -> bool | None:
    """Lock a file. Return whether that succeeded, or ``None`` where there are no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _changes(path: Path) -> list[float]:
    try:
        times = [path.lstat().st_mtime]
        if path.is_dir() and not path.is_symlink():
            times += [time for entry in path.iterdir() for time in _changes(entry)]
    except OSError:  # it goes while we look
        return []
    return times


_all: set[Lease] = set()
"""The leases that this process has taken, or is about to take."""


@cache
def _release_at_exit() -> None:
    atexit.register(_release_all)


def _release_all() -> None:
    for lease in list(_all):
        if lease.guarded is None or not os.path.lexists(lease.guarded):
            lease.release()
