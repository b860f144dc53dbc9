"""A sharded model's weights as plain tensors: what this rank holds of each, under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from mmfsdp.runtime import sharded_model

__all__ = ["LocalView", "exchange", "exchanged"]


class LocalView:
    """A tree of modules without forward whose parameters and buffers are this rank's part of a sharded model's.

    They share memory with the model: what is written to them is trained on, and they follow training. A deep copy of
    the tree is one shard of memory of its own, for averages and the like. Tied parameters are tied in it; with engine
    ``fsdp1`` parameters are one-dimensional pieces.

    Args:
        model: A sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._state = sharded_model(model)
        self._params: list[tuple[nn.Parameter, nn.Module, str]] = []
        self._buffers: list[tuple[nn.Module, nn.Module, str]] = []
        self._state.reshard()
        self._tree = self._copy(self._state.module, {}, {})

    def tree(self) -> nn.Module:
        """Return the view as the model is now; the same object every time. Not collective.

        Call it outside of forward and backward: what is gathered is freed.
        """
        self._state.reshard()
        for view, module, name in self._params:
            live = _local(module._parameters[name])
            if view.data_ptr() != live.data_ptr() or view.shape != live.shape:
                view.data = live
        for view_module, module, name in self._buffers:
            view_module._buffers[name] = module._buffers[name]
        return self._tree

    def _copy(self, module: nn.Module, modules: dict[int, nn.Module], params: dict[int, nn.Parameter]) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        if isinstance(module, FullyShardedDataParallel):
            # The unsharded model has no such step.
            modules[id(module)] = view = self._copy(module.module, modules, params)
            return view
        modules[id(module)] = view = nn.Module()
        view.training = module.training
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in params:
                params[id(param)] = nn.Parameter(_local(param), requires_grad=False)
                self._params.append((params[id(param)], module, name))
            view.register_parameter(name, params[id(param)])
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            view.register_buffer(name, buffer, persistent=persistent)
            self._buffers.append((view, module, name))
        for name, child in module._modules.items():
            view.add_module(name, None if child is None else self._copy(child, modules, params))
        return view


def exchange(first: nn.Module, second: nn.Module) -> None:
    """Exchange the values of two trees of equal parameters and buffers, one tensor at a time. Not collective."""
    with torch.no_grad():
        for mine, yours in _pairs(first, second):
            kept = mine.detach().clone()
            mine.copy_(yours)
            yours.copy_(kept)


@contextmanager
def exchanged(view: LocalView, other: nn.Module) -> Iterator[None]:
    """Let a sharded model have the values of ``other``, which has the model's meanwhile. Not collective.

    Args:
        view: A view of the model.
        other: Made by deep copy of its tree.
    """
    exchange(view.tree(), other)
    try:
        yield
    finally:
        exchange(view.tree(), other)


def _pairs(first: nn.Module, second: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(first.parameters(), second.parameters(), strict=True)
    yield from zip(first.buffers(), second.buffers(), strict=True)


def _local(param: nn.Parameter | None) -> torch.Tensor:
    assert param is not None
    value = param.detach()
    return value.to_local() if isinstance(value, DTensor) else value
