"""Leaves the process group when the process ends: together with all ranks, or at once after an error."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["leave_in_order"]

_PATIENCE = timedelta(seconds=5)
_STOPPED = 2.0  # seconds more, after which the host of the store must have stopped: torch's timeouts do not notice
_LEAVING, _ALL_LEAVE, _FAILED = "mmfsdp/leaving", "mmfsdp/all_leave", "mmfsdp/failed"
_questions: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
_answering: list[threading.Thread] = []  # one; a process that ends can start none


def leave_in_order() -> None:
    """Leave the process group when this process ends, and at once if an error ends it.

    Not collective. Calling it again changes nothing.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)
    if not any(thread.is_alive() for thread in _answering):
        _answering[:] = [threading.Thread(target=_answer, name="mmfsdp-leaving", daemon=True)]
        _answering[0].start()


def _leave() -> None:
    if not dist.is_initialized():
        return
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1") and dist.get_world_size() > 1:
        _end_now(error)
    if _all_leave() and _have_threads_finished():
        dist.destroy_process_group()
    else:
        # destroy_process_group() would wait for collectives with ranks that died, left or stopped. torch has no public
        # function that aborts all groups.
        distributed_c10d._abort_process_group()


def _all_leave() -> bool:
    """Wait some seconds for the other ranks, and return whether all are leaving. Collective; ranks may be missing.

    A rank that ends too early breaks collectives of the others. The store is used because its wait takes a timeout:
    gloo's monitored barrier rejects groups of mixed backends, and every rank but the first waits for the whole timeout
    of the group.
    """

    def meet() -> bool:
        store = _store()
        if store.add(_LEAVING, 1) == dist.get_world_size():
            store.set(_ALL_LEAVE, "")
        store.wait([_ALL_LEAVE], _PATIENCE)
        return True

    return _asked(meet) is True


def _asked(ask: Callable[[], Any]) -> Any:
    """Return the store's answer; None if a rank is missing, or the rank that hosts the store has ended or stopped."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _questions.put((ask, answers))
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=_PATIENCE.total_seconds() + _STOPPED)


def _answer() -> None:
    """Ask the store on behalf of a process that ends, in a thread, so that it need not wait for an answer."""
    while True:
        ask, answers = _questions.get()
        try:
            answers.put(ask())
        except RuntimeError:
            answers.put(None)


def _have_threads_finished() -> bool:
    """Wait until gloo's threads have finished their work, and return whether they have. Collective: every rank.

    They release tensors after a collective has returned, which needs a living interpreter: a late thread would end
    the process with SIGABRT. A rank that has just died or stopped is not waited for longer than some seconds.
    """
    group = dist.group.WORLD
    assert group is not None
    within = dist.AllreduceOptions()
    within.timeout = _PATIENCE  # Work.wait() takes one, too, but gloo's threads would go on, and the group joins them
    try:
        work = group.allreduce([torch.zeros(())], within)
    except RuntimeError:  # without a CPU backend there are no such threads
        return True
    try:
        return bool(work.wait())
    except RuntimeError:
        return False


def _end_now(error: BaseException) -> None:
    """End the process with exit code 1 after an error was printed, and print which rank failed first.

    The other ranks wait for this one in a collective, and leaving the group in order would wait for them. Ending at
    once lets the launcher stop them, or they fail with a closed connection, which names no cause.
    """
    mine = f"rank {dist.get_rank()} on host {socket.gethostname()!r}: {type(error).__name__}: {error}"
    first = _asked(lambda: _store().compare_set(_FAILED, "", mine).decode())
    if first not in (None, mine):
        print(f"The first error was on {first}", file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(1)


def _store() -> Any:
    return distributed_c10d._get_default_store()  # no public function returns the group's store
