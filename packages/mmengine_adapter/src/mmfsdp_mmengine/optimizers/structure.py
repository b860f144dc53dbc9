"""Copies a model's structure without its memory, for optimizer constructors that run after sharding."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn

__all__ = ["structure_of"]


def structure_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device; tied ones stay tied.

    Args:
        model: A model that is not sharded. Not changed.
    """
    memo: dict[int, object] = {}
    for param in model.parameters():
        memo[id(param)] = copied = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        vars(copied).update(vars(param))
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
