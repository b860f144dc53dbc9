"""Gives compiled modules of divided models plain tensors, where their inputs are collectives that still run.

Tensor parallelism returns such tensors, which wait once they are used. From torch 2.13 on, a compiled module takes one
for a tensor without a gradient: what is before the module then gets none, without an error
(https://github.com/pytorch/pytorch/pull/191113). Older releases raise for some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from mmfsdp.planning.compiled import around_compiled, compiled_call, is_compiled

__all__ = ["wait_before_compiled"]


def wait_before_compiled(model: nn.Module) -> None:
    """Wait for the inputs of compiled modules, outside of their graphs. Not collective.

    Modules may be compiled later, too: the model looks for them before each of its forwards.

    Args:
        model: A sharded model that tensor parallelism has divided.
    """
    _wrap_compiled(model)
    model.register_forward_pre_hook(torch.compiler.disable(_before_forward), prepend=True)


def _before_forward(model: nn.Module, _: Any) -> None:
    _wrap_compiled(model)


def _wrap_compiled(model: nn.Module) -> None:
    for module in model.modules():
        if is_compiled(module) and not isinstance(compiled_call(module), _Waiting):
            around_compiled(module, _Waiting)


class _Waiting:
    """The compiled call of a module, which gets inputs that have arrived."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # within a graph nothing is pending
            args, kwargs = tree_map_only(torch.Tensor, _arrived, (args, kwargs))
        return self._call(*args, **kwargs)


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that is pending, which keeps its gradient; or else the tensor itself."""
    return tensor.clone() if hasattr(tensor, "wait") else tensor  # the documentation of DTensor.to_local() has `wait`
