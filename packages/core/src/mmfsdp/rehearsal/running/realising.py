"""Makes real tensors of a model and a batch that have none, so that a step can run: values do not matter, time does."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.fakes.fake_copies import like

__all__ = ["real_batch", "real_model"]


def real_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model on a device; what is on ``meta`` gets values, the same on every rank.

    Matrices are random and small; vectors, such as the weights of norms, are one; integers are zero.

    Raises:
        ConfigError: The model cannot be copied.
    """
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in memo:
                values = _filled(tensor, generator) if tensor.is_meta else tensor
                memo[id(tensor)] = like(tensor, device).copy_(values)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # modules may refuse in any way
        raise ConfigError(
            f"{type(model).__name__} cannot be copied, and measuring must not change it: {type(error).__name__}: "
            f"{error}"
        ) from error


def real_batch(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch, in any structure, on a device.

    Tensors on ``meta`` get values: random ones, and integers are zero.
    """

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(device, copy=True)
        drawn = torch.rand if tensor.is_floating_point() else torch.zeros
        return drawn(tensor.shape).to(device, tensor.dtype)

    return tree_map_only(torch.Tensor, real, batch)


def _filled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() < 2:
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    return (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
