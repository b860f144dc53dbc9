"""Buffers that all ranks are to have alike, as DistributedDataParallel keeps them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.runtime import ShardedModel, sharded_model
from mmfsdp.state.model import send_from_first

__all__ = ["broadcast_buffers", "keep_buffers_alike"]


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of the mesh's first. Collective: every rank; one broadcast per dtype."""
    state = sharded_model(model)
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in state.module.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            joined = torch.cat([buffer.reshape(-1) for buffer in buffers])
            send_from_first(joined, state)
            for buffer, part in zip(buffers, joined.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))


def keep_buffers_alike(model: nn.Module) -> None:
    """Broadcast buffers before each forward that is trained on, but not within an accumulation. Not collective.

    That is what ``DistributedDataParallel(broadcast_buffers=True)`` does.

    Args:
        model: A sharded model.
    """
    state = weakref.ref(sharded_model(model))
    is_due = True

    def before(module: nn.Module, args: Any) -> None:
        nonlocal is_due
        live: ShardedModel | None = state()
        if live is None or not torch.is_grad_enabled():
            return
        if is_due:
            broadcast_buffers(live.module)
        is_due = live.sync_gradients

    sharded_model(model).module.register_forward_pre_hook(before)
