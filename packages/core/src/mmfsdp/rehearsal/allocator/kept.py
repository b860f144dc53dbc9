"""The memory of a real rank: the bytes that it keeps between steps, by kind, and whether its GPU is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.nn as nn

from mmfsdp.rehearsal.fakes.fake import local_of

__all__ = ["kept_bytes", "retries_said", "retries_so_far"]


def kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the bytes of this rank's parameters, buffers and, with an optimizer, its state. Not collective."""
    counts: Counter[str] = Counter()
    counts["parameter"] = _size(model.parameters())
    counts["buffer"] = _size(model.buffers())
    if optimizer is not None and optimizer.state:
        counts["optimizer state"] = _size(
            value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor)
        )
    return dict(counts)


def retries_so_far() -> int:
    """Return how often torch gave cached memory back to this process's GPU because it was full; 0 without a GPU."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_available() else 0


def retries_said(number: int, steps: int) -> str:
    """Return a sentence about what `retries_so_far` counted in a number of steps; empty if it counted nothing."""
    if not number:
        return ""
    often = "once" if number == 1 else f"{number} times"
    return (
        f"The GPU is full: in {steps} steps torch gave cached memory back {often}, and waited. "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps, or smaller micro-batches."
    )


def _size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of different storages."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (local_of(t).untyped_storage() for t in tensors)}
    return sum(storages.values())
