"""Files that a process keeps locked while it writes a checkpoint: they tell others whether it is still there.

The kernel drops a lock when its process dies, whatever the host is called and whatever the process id is. Not every
shared file system shows the locks of one machine to another, or of one mount to another. So a lock that is free proves
a death only on the machine and the mount that the lease names; elsewhere, what has not changed for an hour counts as
left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["ABANDONED", "Lease", "is_alive", "machine", "writer"]

ABANDONED = 3600
"""Seconds without any change after which what another machine may be writing counts as left behind."""


class Lease:
    """A file that this process holds locked until it releases it, or dies.

    Args:
        path: The file, which is locked.
        descriptor: Its open descriptor.
    """

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, *, wait: bool = False) -> Lease | None:
        """Create a file, or take over that of a dead process, and hold it locked.

        Where the file system has no locks, everybody gets the lease.

        Args:
            path: The file.
            wait: Wait for who holds it; otherwise return ``None`` if another process does.
        """
        while True:
            descriptor = _opened(path)
            try:
                if _locked(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)) is False:
                    os.close(descriptor)
                    return None
                if _is_at(descriptor, path):  # and was not released, and removed, in the meantime
                    _sign(descriptor)
                    return cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self) -> None:
        """Remove the file and unlock it."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._descriptor)

    def age_of(self, path: Path) -> float:
        """Return the seconds between the last change of a file, or of anything in a directory, and this lease.

        Both times are those of the file system, so that the clocks of machines need not agree.
        """
        return os.fstat(self._descriptor).st_mtime - max(_changes(path), default=0.0)


def is_alive(lease: Path, held: Path, own: Lease) -> bool:
    """Tell whether what stands under a lease may still be written: ``False`` only if that is sure.

    Args:
        lease: The lease of another process. Without one, age alone decides.
        held: What that process writes: a file or a directory.
        own: A lease that was taken just now in the same directory, which tells the time.
    """
    try:
        descriptor = os.open(lease, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return own.age_of(held) < ABANDONED
    try:
        free = _locked(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if free is False:
            return True
        if free and writer(lease).get("machine") == machine(descriptor):
            return False
    finally:
        os.close(descriptor)
    return min(own.age_of(held), own.age_of(lease)) < ABANDONED


def writer(lease: Path) -> dict[str, Any]:
    """Return what a lease says about its process: ``machine``, ``host`` and ``pid``; empty if it says nothing."""
    try:
        content = json.loads(lease.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def machine(descriptor: int) -> str:
    """Return what tells this machine since it was started, and the mount of a file, from any other.

    Containers on one machine are the same machine.
    """
    return f"{_boot()}/{os.fstat(descriptor).st_dev}"


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # of another user, who may be dead
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _sign(descriptor: int) -> None:
    text = json.dumps({"machine": machine(descriptor), "host": socket.gethostname(), "pid": os.getpid()})
    with contextlib.suppress(OSError):  # it may be open for reading only
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _locked(descriptor: int, operation: int) -> bool | None:
    """Lock a file: whether that succeeded, or ``None`` where there are no locks."""
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
