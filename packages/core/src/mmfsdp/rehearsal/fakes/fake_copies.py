"""Copies models and batches into tensors of the same shapes, dtypes and ties that take no memory: fake or meta ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal.fakes.fake import without_fakes

__all__ = ["fake_batch", "fake_model", "like", "meta_model"]

_CPU = torch.device("cpu")
_META = torch.device("meta")


def fake_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model with fake parameters and buffers on the CPU; the model itself is not changed.

    Call it in the context of `fake_tensors`.

    Raises:
        ConfigError: The model cannot be copied.
    """
    return _copied(model, _CPU)


def meta_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model with parameters and buffers on the meta device; the model itself is not changed.

    Raises:
        ConfigError: The model cannot be copied.
    """
    return _copied(model, _META)


def fake_batch(batch: Any) -> Any:
    """Return a batch, in any structure, with fake tensors on the CPU in place of its tensors."""
    return tree_map_only(torch.Tensor, like, batch)


def _copied(model: nn.Module, device: torch.device) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in memo:
            memo[id(tensor)] = like(tensor, device)
    try:
        with without_fakes():  # other tensors, such as anchors in a list, keep their values
            return copy.deepcopy(model, memo)
    except Exception as error:  # modules may refuse in any way
        raise ConfigError(
            f"{type(model).__name__} cannot be copied for a rehearsal, which must not change it: "
            f"{type(error).__name__}: {error}"
        ) from error


def like(tensor: torch.Tensor, device: torch.device = _CPU) -> torch.Tensor:
    """Return a tensor or parameter of the same shape, strides, dtype and attributes, whose values are not set."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))
        return made
    return made.requires_grad_(tensor.requires_grad)
