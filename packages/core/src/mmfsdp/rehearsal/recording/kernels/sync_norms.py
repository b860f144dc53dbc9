"""Lets ``SyncBatchNorm`` run in a rehearsal, which computes on the CPU, with the messages that it sends elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

__all__ = ["sync_norms"]

# Its name since torch 2.13, where the other one warns.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class _Exchange(torch.autograd.Function):
    """Sends what torch's SyncBatchNorm does: forward means, deviations and a count, backward two sums per channel."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, channels: int, group: Any) -> torch.Tensor:
        ctx.channels, ctx.group = channels, group
        own = torch.zeros(2 * channels + 1, dtype=torch.float32)
        _all_gather(torch.zeros(dist.get_world_size(group) * own.numel()), own, group)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dist.all_reduce(torch.zeros(2 * ctx.channels), group=ctx.group)
        return grad, None, None


@contextmanager
def sync_norms() -> Iterator[None]:
    """Replace the forward of ``SyncBatchNorm``, which rejects tensors on the CPU."""
    stock = nn.SyncBatchNorm.forward

    def forward(norm: nn.SyncBatchNorm, inputs: torch.Tensor) -> torch.Tensor:
        group = norm.process_group or dist.group.WORLD
        if norm.training and dist.get_world_size(group) > 1:
            inputs = _Exchange.apply(inputs, norm.num_features, group)  # type: ignore[no-untyped-call]
        return nn.BatchNorm2d.forward(norm, inputs)

    nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = stock  # type: ignore[method-assign]
