"""Losses that hold more memory than the number that they return, and CTC, whose shapes depend on lengths. Pure."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CTC", "kept_loss_bytes", "loss_bytes", "run_ctc"]

_KEEP = ("aten::mse_loss", "aten::smooth_l1_loss", "aten::binary_cross_entropy", "aten::soft_margin_loss")
"""They allocate a result for all elements, and shrink its shape; the storage stays until the loss is gone
(aten/src/ATen/native/BinaryOps.cpp, Loss.cpp)."""
_HOLD = ("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss")
"""They compute all elements in another tensor, which they add up."""

CTC = _CTC, _CTC_BACKWARD = "aten::_ctc_loss", "aten::_ctc_loss_backward"


def kept_loss_bytes(name: str, args: Any, result: Any) -> int:
    """Return the bytes of the storage of a loss, if they are more than it shows; 0 for others."""
    return int(args[0].nbytes) if name in _KEEP and not result.dim() else 0


def loss_bytes(name: str, args: Any, result: Any) -> int:
    """Return the scratch bytes of a loss or its backward; 0 for other operators."""
    if name == _CTC_BACKWARD:
        return int(args[6].nbytes)
    return int(args[0].nbytes) if name in _HOLD and not result.dim() else 0


def run_ctc(name: str, args: Any) -> Any:
    """Return what CTC, or its backward, returns on shapes; ``NotImplemented`` if lengths decide and are not known.

    It keeps a row of twice the longest target for each element of the sequence. Targets that are padded to a common
    length are taken to have one of it.

    Args:
        name: One of `CTC`.
        args: The operator's arguments.
    """
    if name == _CTC_BACKWARD:
        return torch.empty_like(args[1])
    scores, targets = args[:2]
    if targets.dim() != 2:
        return NotImplemented
    length, batch = scores.shape[:2]
    return scores.new_empty(batch), scores.new_empty(batch, length, 2 * targets.shape[1] + 1)
