"""Leaving the process group as the process ends: together if all is well, at once if an error ends this rank."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["leave_in_order"]

_PATIENCE = timedelta(seconds=5)
_LEAVING, _ALL_LEAVE, _FAILED = "mmfsdp/leaving", "mmfsdp/all_leave", "mmfsdp/failed"


def leave_in_order() -> None:
    """When this process ends, leave the process group, whoever started it; at once if an error ends it.

    Not collective. Calling it again changes nothing.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if not dist.is_initialized():
        return
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1") and dist.get_world_size() > 1:
        _end_now(error)
    if _all_leave():
        _let_threads_finish()
        dist.destroy_process_group()
    else:
        # Destroying would wait for what is under way with ranks that died, or went on without this one. There is no
        # public function that aborts all groups.
        distributed_c10d._abort_process_group()


def _all_leave() -> bool:
    """Wait for the others, for some seconds, and tell whether they came. Collective, but ranks may be missing.

    A rank that ends too early fails those that still talk to it. The store is asked because it can be waited on for a
    time of one's own: gloo's monitored barrier refuses groups of mixed backends, and on every rank but the first waits
    as long as the group's timeout says.
    """
    try:
        store = _store()
        if store.add(_LEAVING, 1) == dist.get_world_size():
            store.set(_ALL_LEAVE, "")
        store.wait([_ALL_LEAVE], _PATIENCE)
    except RuntimeError:  # they did not come, or the rank that keeps the store has ended
        return False
    return True


def _let_threads_finish() -> None:
    """Wait until gloo's threads have done what they were given. Collective: every rank.

    They let go of tensors after a collective has returned, and need Python for it: one that is late ends the process
    with SIGABRT although all its work is done.
    """
    with contextlib.suppress(RuntimeError):  # no backend for the CPU, so no such threads; or a rank died just now
        dist.all_reduce(torch.zeros(()))


def _end_now(error: BaseException) -> None:
    """End with the exit code of an error that is printed already, and say which rank's error was the first.

    The others wait for this rank in a collective, and leaving the group would wait for them: so the launcher stops
    them, or they find the connection closed, of which torch says no more than that.
    """
    mine = f"rank {dist.get_rank()} on host {socket.gethostname()!r}: {type(error).__name__}: {error}"
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store has ended
        first = _store().compare_set(_FAILED, "", mine).decode()
        if first != mine:
            print(f"The first error was that of {first}", file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(1)


def _store() -> Any:
    return distributed_c10d._get_default_store()  # the group's own, which no public function returns
