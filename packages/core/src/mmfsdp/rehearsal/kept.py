"""The bytes that a real rank keeps between steps, by the kinds of a rehearsal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.nn as nn

from mmfsdp.rehearsal.fake import local_of

__all__ = ["kept_bytes"]


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


def _size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of different storages."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (local_of(t).untyped_storage() for t in tensors)}
    return sum(storages.values())
