"""Takes and restores the buffers of a rank, such as running statistics, where they differ from those of other ranks."""

from __future__ import annotations

import torch
import torch.nn as nn

from mmfsdp.basics.text import clean_fqn
from mmfsdp.runtime.sharded_model import find_sharded_model

__all__ = ["persistent_buffers", "restore_buffers"]


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return by FQN the buffers that a checkpoint of the model holds, with the values of this rank. Not collective.

    Args:
        model: A sharded model.
    """
    state = find_sharded_model(model)
    saved = {buffer.fqn for buffer in state.plan.buffers if buffer.persistent}
    named = {clean_fqn(name): buffer for name, buffer in state.module.named_buffers()}
    return {name: buffer.detach() for name, buffer in named.items() if name in saved}


def restore_buffers(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Give a rank's buffers the values that `persistent_buffers` returned. Not collective."""
    for name, buffer in persistent_buffers(model).items():
        if name in saved:
            buffer.copy_(saved[name])
