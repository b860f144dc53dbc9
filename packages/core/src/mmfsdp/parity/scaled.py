"""Notices tensors that were only multiplied by a number since they were sketched, as clipping does to gradients."""

from __future__ import annotations

import math

import torch

from mmfsdp.parity.heads import square_of

__all__ = ["Scaled"]

_EVERY = 97  # elements that a sample stands for
_NEAR = {torch.float32: 1e-6, torch.float64: 1e-14}
"""How far a sample may be from that of before times a number, as a share. What was done in other dtypes rounds more."""
_NORM = 1e-5  # how far the norm may be from that


class Scaled:
    """Samples of tensors that were sketched. Only on the CPU: elsewhere, to look at them would wait for the device."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float, torch.Tensor]] = {}

    def remember(self, name: str, value: torch.Tensor, row: int, square: float) -> None:
        """Keep a sample of a tensor.

        Args:
            name: A name to find it by.
            value: The tensor.
            row: The row of its sketch.
            square: The sum of its squares.
        """
        if value.is_contiguous() and value.dtype in _NEAR and 0 < square < math.inf:
            self._known[name] = row, square, _sample(value)

    def find(self, name: str, value: torch.Tensor) -> tuple[int, float] | None:
        """Return the row of the sketch of the same tensor before, and the number it was multiplied by; else None.

        Every 97th element must be the one of before times that number, and so must be the norm.
        """
        row, square, before = self._known.get(name, (0, 0.0, None))
        if before is None or not value.is_contiguous() or value.dtype not in _NEAR:
            return None
        norm = math.sqrt(square_of(value))  # reads the tensor, so that the sample is in the processor's cache
        after = _sample(value)
        size = before.dot(before).item()
        if after.shape != before.shape or not size:
            return None
        factor = before.dot(after).item() / size
        rest = torch.sub(after, before, alpha=factor).norm().item()
        expected = abs(factor) * math.sqrt(square)
        near = rest <= _NEAR[value.dtype] * abs(factor) * math.sqrt(size) and abs(norm - expected) <= _NORM * expected
        return (row, factor) if near and factor else None

    def clear(self) -> None:
        """Forget all tensors."""
        self._known.clear()


def _sample(value: torch.Tensor) -> torch.Tensor:
    return value.detach().view(-1)[::_EVERY].to(torch.float64)
