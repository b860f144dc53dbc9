"""Lets the workers of a data loader outlive signals that were not sent by their rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["patient_workers"]


def patient_workers(loader: DataLoader[Any]) -> None:
    """Let the workers of a data loader, in place, outlive SIGTERM and SIGUSR1 from others than their rank.

    torchrun signals the process group of a rank, and Slurm every process of a step. A worker that dies of it ends
    training with an error before the ranks could save. Workers still end when their rank ends them, or when it is gone.
    Processes that a worker starts have both signals blocked. Not collective; does nothing without workers, and where
    the system cannot tell who sent a signal (it can on Linux). `mmfsdp.DataPosition` does it for its loader.

    Args:
        loader: The loader. Its ``worker_init_fn`` runs as before.
    """
    if not loader.num_workers or not hasattr(signal, "sigwaitinfo"):
        return
    init: Any = loader.worker_init_fn
    # A partial stays one, with its keywords: MMEngine changes the seed among them when a run resumes.
    known = (init.func, *init.args) if isinstance(init, partial) else (init,)
    if known[0] is not _outlive_signals:
        loader.worker_init_fn = partial(_outlive_signals, *known, **getattr(init, "keywords", {}))


def _outlive_signals(init: Callable[..., None] | None, *args: Any, **kwargs: Any) -> None:
    rank = multiprocessing.parent_process()
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for the thread, too: it alone takes them
    threading.Thread(target=_take, args=(signals, None if rank is None else rank.pid), daemon=True).start()
    if init is not None:
        init(*args, **kwargs)


def _take(signals: set[signal.Signals], rank: int | None) -> None:
    while True:
        taken = signal.sigwaitinfo(signals)
        if taken.si_signo == signal.SIGTERM and taken.si_pid == rank:
            os._exit(0)  # as Python ends workers that are left when the rank exits
