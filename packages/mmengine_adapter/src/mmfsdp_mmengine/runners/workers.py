"""Lets the workers of data loaders outlive the signals that torchrun sends to the process group of a rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["with_patient_workers"]


def with_patient_workers(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds data loaders whose workers each lead a process group of their own.

    torchrun signals the group of a rank, and a worker that dies of it would end training with an error before the ranks
    could save. To ignore the signal instead would be wrong: with SIGTERM Python ends workers that are left at its exit.

    Args:
        build: Builds a data loader.
    """

    def build_dataloader(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        if isinstance(loader, DataLoader) and loader.num_workers:
            init: Any = loader.worker_init_fn
            # Still a partial with MMEngine's keywords: what resumes a run changes the seed among them.
            known = (init.func, *init.args) if isinstance(init, partial) else (init,)
            if known[0] is not _lead_a_group:
                loader.worker_init_fn = partial(_lead_a_group, *known, **getattr(init, "keywords", {}))
        return loader

    return build_dataloader


def _lead_a_group(init: Callable[..., None] | None, *args: Any, **kwargs: Any) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpgid(0, 0)
    if init is not None:
        init(*args, **kwargs)
