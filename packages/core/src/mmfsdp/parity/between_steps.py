"""Finds parameters that change between two steps, such as by a stale copy: by their norms, without keeping them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

__all__ = ["BetweenSteps"]


class BetweenSteps:
    """The norms of this rank's parts of parameters after a step. Equal numbers have equal norms, to the last bit."""

    def __init__(self) -> None:
        self._norms: list[float] | None = None

    def remember(self, params: Iterable[torch.Tensor]) -> None:
        """Keep the norms after a step. Not collective."""
        self._norms = _norms(params)

    def changed(self, params: Iterable[torch.Tensor]) -> list[int]:
        """Return the places of parameters that differ from those remembered, which are forgotten. Not collective."""
        before, self._norms = self._norms, None
        if before is None:
            return []
        now = _norms(params)
        return [place for place, (old, new) in enumerate(zip(before, now, strict=False)) if old != new and old == old]


@torch.no_grad()
def _norms(params: Iterable[torch.Tensor]) -> list[float]:
    held = [param.to_local() if isinstance(param, DTensor) else param for param in params]
    wide = (torch.float64, torch.complex64, torch.complex128)
    # The device has just been waited for, as a recorded step ends with its figures on the CPU.
    return [float(torch.linalg.vector_norm(part, dtype=None if part.dtype in wide else torch.float32)) for part in held]
