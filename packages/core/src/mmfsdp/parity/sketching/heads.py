"""Computes sums, sums of squares and extremes of tensors: what `Figures` has before a sketch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mmfsdp.parity.sketching.buckets import BLOCK
from mmfsdp.parity.sketching.chunks import WIDTH

__all__ = ["Head", "head_of", "head_of_block", "join_heads", "square_of", "vector_of"]

_BLOCK = BLOCK * WIDTH  # elements whose squares are summed in single precision
_TINY = 1e-30  # a sum of squares in single precision that may have lost some

Head = torch.Tensor | tuple[float, ...]
"""Sum, sum of squares, lowest, highest, and how many elements are not finite; a tensor where a device has them."""


def head_of(values: torch.Tensor) -> torch.Tensor:
    """Return the head of a tensor, without waiting for its device."""
    low, high = torch.aminmax(values)
    odd = values.numel() - values.isfinite().sum()
    square = torch.linalg.vector_norm(values).to(torch.float64).square()
    return torch.stack([*(part.to(torch.float64) for part in (values.sum(), square, low, high, odd))])


def head_of_block(flat: torch.Tensor) -> tuple[float, ...]:
    """Return the head of a block on the CPU that a cache holds; without extremes if its elements are not all finite."""
    square = torch.dot(flat, flat).item()
    if not square < math.inf:
        return math.nan, square, math.nan, math.nan, 0.0
    # Two thirds of the time of torch.aminmax, which has no vectors.
    return flat.sum().item(), square, flat.amin().item(), flat.amax().item(), 0.0


def join_heads(blocks: Sequence[tuple[float, ...]], value: torch.Tensor, *, is_padded: bool) -> Head:
    """Return the head of a tensor on the CPU from the heads of its blocks.

    Args:
        blocks: The heads of the blocks.
        value: The tensor.
        is_padded: Whether zeros were added to it, which may be none of its extremes.
    """
    if len(blocks) == 1:
        total, square, low, high, _ = blocks[0]
    else:
        totals, squares, lows, highs, _ = zip(*blocks, strict=True)
        total, square, low, high = math.fsum(totals), math.fsum(squares), min(lows), max(highs)
    if not _TINY < square < math.inf:
        if square == low == high == 0:
            return total, square, low, high, 0.0
        # It has infinite or NaN elements, or ones whose squares overflow or vanish.
        return head_of(value.to(torch.float64))
    if is_padded:
        low, high = (extreme.item() for extreme in torch.aminmax(value))
    return total, square, low, high, 0.0


def square_of(value: torch.Tensor) -> float:
    """Return the sum of squares of a contiguous tensor of float32 or float64 on the CPU; equal ones have equal sums."""
    flat = value.detach().view(-1)
    if flat.numel() <= _BLOCK:
        return flat.dot(flat).item()
    return math.fsum(part.dot(part).item() for part in flat.split(_BLOCK))


def vector_of(head: Head) -> torch.Tensor:
    """Return a head as a tensor of float64."""
    return head if isinstance(head, torch.Tensor) else torch.tensor(head, dtype=torch.float64)
