"""Keeps recurrent networks from moving gathered weights to other memory."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn as nn

__all__ = ["leave_weights_in_place"]


def leave_weights_in_place(model: nn.Module) -> None:
    """Make ``flatten_parameters()`` of recurrent networks do nothing. Not collective.

    On a GPU ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call it in their first forward: it gives all weights one piece of
    memory and lets the parameters point there. With ``fully_shard`` these are copies that torch gathers into other
    memory, so that every later step would compute with the weights of the first. Without it cuDNN makes a copy of the
    weights in each forward.

    Args:
        model: The sharded model.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            vars(module)["flatten_parameters"] = _InPlace(module)


class _InPlace:
    """Replaces ``flatten_parameters`` of a module."""

    def __init__(self, module: nn.RNNBase) -> None:
        self.module = module

    def __call__(self) -> None:
        """Do nothing."""

    def __reduce__(self) -> Any:
        # A copy of the module is a plain module.
        return MethodType, (type(self.module).flatten_parameters, self.module)
