"""Copies nested content into CPU memory that is kept from save to save."""

from __future__ import annotations

from typing import Any

import torch

# The public way here, `DefaultStager`, empties itself after each use in torch 2.11 and 2.12: its second use raises
# KeyError. This is the part of it that copies, the same in all releases.
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

__all__ = ["Stager"]


class Stager:
    """Copies tensors into memory of its own, which the next copy of the same storages uses again.

    Args:
        pinned: Whether the memory is page-locked, and copied to without waiting for each tensor.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._stager = StateDictStager(pin_memory=pinned, share_memory=False)

    def stage(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of nested content, whose tensors are in CPU memory, when it is complete. Not collective."""
        copy: Any = self._stager.stage(content, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return dict(copy)
