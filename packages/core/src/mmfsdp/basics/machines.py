"""Identifies machines and processes, and keeps what one process owns out of the processes forked from it."""

from __future__ import annotations

import os
import weakref
from functools import cache
from pathlib import Path
from typing import Protocol

__all__ = ["boot_id", "close_in_children", "has_ended", "process_id"]


@cache
def boot_id() -> str | None:
    """Return what identifies this machine since it was started, its containers included; None where it is not known.

    Linux alone tells, and a sandbox may hide it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def process_id() -> str | None:
    """Return what identifies this process on its machine; None where ``/proc`` is missing.

    Unlike a number alone, it is never the same for a later process or one in another container.
    """
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}/{_state(os.getpid())[1]}"
    except OSError:
        return None


def has_ended(process: str) -> bool:
    """Tell whether a process of this machine has certainly ended.

    Args:
        process: What `process_id` returned there.
    """
    try:
        namespace, pid, begun = map(int, process.split("/"))
        if namespace != os.stat("/proc/self/ns/pid").st_ino:
            return False
    except (OSError, ValueError):
        return False
    try:
        state, since = _state(pid)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return since != begun or state in "ZX"


def _state(pid: int) -> tuple[str, int]:
    """Return the state of a process, and when it began, in clock ticks: fields 3 and 22 of proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


class _Closable(Protocol):
    def close_in_child(self) -> None: ...


_owned: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(item: _Closable) -> None:
    """Call ``item.close_in_child()`` in each process that Python forks from this one.

    Locks and sockets live until the last process that has them ends, so a forked logger or uploader would keep a dead
    trainer's.
    """
    _register()
    _owned.add(item)


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for item in list(_owned):
        item.close_in_child()
    _owned.clear()
