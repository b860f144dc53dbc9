"""Shows this rank's part of a sharded model's weights as plain tensors under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from mmfsdp.runtime.sharded_model import find_sharded_model

__all__ = ["LocalView", "exchange", "exchanged"]


class LocalView:
    """A tree of modules without forward that holds this rank's part of a sharded model's parameters and buffers.

    They share memory with the model: training changes them, and what you write to them is trained on. A deep copy of
    the tree needs the memory of one shard, which suits averages. Tied parameters are tied in the tree, too. With engine
    ``fsdp1`` parameters are one-dimensional pieces.

    Args:
        model: A sharded model. With engine ``fsdp1`` this is collective, as making a view frees gathered parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._state = find_sharded_model(model)
        self._params: list[_Viewed] = []
        self._buffers: list[tuple[nn.Module, nn.Module, str]] = []
        if not self._state.engine.shows_pieces(self._state):
            self._state.reshard()
        self._shards = {key: shard for key, (_, shard) in self._state.gathered().items()}
        self._tree = self._copy(self._state.module, {}, {})

    def tree(self) -> nn.Module:
        """Return the current view, always the same object. Not collective; changes nothing.

        Call `before_writing` before you write to it.
        """
        if self._state.engine.shows_pieces(self._state):
            gathered = self._state.gathered()
            for viewed in self._params:
                param = viewed.params[viewed.name]
                if gathered and id(param) in gathered:
                    param = gathered[id(param)][1]
                if not viewed.shows(param):
                    viewed.show(param)
        for view_module, module, name in self._buffers:
            view_module._buffers[name] = module._buffers[name]
        return self._tree

    def before_writing(self) -> None:
        """Prepare for writes to the view. Call it on every rank, outside of forward and backward."""
        self._state.before_writing()

    def _copy(self, module: nn.Module, modules: dict[int, nn.Module], params: dict[int, nn.Parameter]) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        if isinstance(module, FullyShardedDataParallel):
            # The unsharded model has no such wrapper.
            modules[id(module)] = view = self._copy(module.module, modules, params)
            return view
        modules[id(module)] = view = nn.Module()
        view.training = module.training
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in params:
                shard = self._shards.get(id(param), param)
                params[id(param)] = nn.Parameter(_local(shard), requires_grad=False)
                self._params.append(_Viewed(params[id(param)], module, name, shard))
            view.register_parameter(name, params[id(param)])
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            view.register_buffer(name, buffer, persistent=persistent)
            self._buffers.append((view, module, name))
        for name, child in module._modules.items():
            view.add_module(name, None if child is None else self._copy(child, modules, params))
        return view


def exchange(first: nn.Module, second: nn.Module) -> None:
    """Swap the values of two trees with equal parameters and buffers, one tensor at a time. Not collective."""
    with torch.no_grad():
        for mine, yours in _pairs(first, second):
            kept = mine.detach().clone()
            mine.copy_(yours)
            yours.copy_(kept)


@contextmanager
def exchanged(view: LocalView, other: nn.Module) -> Iterator[None]:
    """Swap the values of a sharded model and ``other`` within the context. Collective: every rank, see `LocalView`.

    Args:
        view: A view of the model.
        other: A deep copy of the view's tree.
    """
    view.before_writing()
    exchange(view.tree(), other)
    try:
        yield
    finally:
        view.before_writing()
        exchange(view.tree(), other)


def _pairs(first: nn.Module, second: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(first.parameters(), second.parameters(), strict=True)
    yield from zip(first.buffers(), second.buffers(), strict=True)


class _Viewed:
    """A parameter of the view, and the memory of the model that it shows.

    Loading with ``assign`` or moving to a device replaces the memory. An average asks in every step, and to_local() of
    a thousand parameters takes several milliseconds.
    """

    __slots__ = ("_held", "_pointer", "name", "params", "view")

    def __init__(self, view: nn.Parameter, module: nn.Module, name: str, shard: nn.Parameter) -> None:
        self.view, self.params, self.name = view, module._parameters, name
        self._remember(shard)

    def shows(self, param: Any) -> bool:
        """Whether the view shows the memory of ``param``."""
        if self._held is not None:
            return getattr(param, "_local_tensor", None) is self._held
        return bool(param.data_ptr() == self._pointer and param.shape == self.view.shape)

    def show(self, param: Any) -> None:
        """Let the view show the memory of ``param``."""
        self.view.data = _local(param)
        self._remember(param)

    def _remember(self, param: Any) -> None:
        self._held = param._local_tensor if isinstance(param, DTensor) else None
        self._pointer = param.data_ptr() if self._held is None else 0


def _local(param: torch.Tensor) -> torch.Tensor:
    value = param.detach()
    return value.to_local() if isinstance(value, DTensor) else value
