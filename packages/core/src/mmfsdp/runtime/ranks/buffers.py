"""Keeps buffers equal on all ranks, as DistributedDataParallel does."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.collective.broadcasting import as_bytes, broadcast_tensor
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model

__all__ = ["broadcast_buffers", "keep_buffers_alike"]


def broadcast_buffers(model: nn.Module) -> None:
    """Copy the first rank's buffers to every rank of the mesh. Collective: every rank; one broadcast per device."""
    state = find_sharded_model(model)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for buffer in state.module.buffers():
        if buffer.numel():
            by_device.setdefault(buffer.device, []).append(buffer)
    with torch.no_grad():
        for buffers in by_device.values():
            joined = torch.cat([as_bytes(buffer.contiguous()) for buffer in buffers])
            broadcast_tensor(joined, state.mesh)
            sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
            for buffer, part in zip(buffers, joined.split(sizes), strict=True):
                # A copy, because a part may begin at an address that its dtype does not allow.
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def keep_buffers_alike(model: nn.Module) -> None:
    """Broadcast buffers before each training forward, except within an accumulation. Not collective.

    ``DistributedDataParallel(broadcast_buffers=True)`` does the same.

    Args:
        model: A sharded model.
    """
    state = weakref.ref(find_sharded_model(model))
    is_due = True

    def before(module: nn.Module, args: Any) -> None:
        nonlocal is_due
        live: ShardedModel | None = state()
        if live is None or not torch.is_grad_enabled():
            return
        if is_due:
            broadcast_buffers(live.module)
        is_due = live.sync_gradients

    find_sharded_model(model).module.register_forward_pre_hook(torch.compiler.disable(before))
