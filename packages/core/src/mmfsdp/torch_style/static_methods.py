"""Static methods that can also be called on an instance without naming the module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn as nn

__all__ = ["instance_or_static"]


class instance_or_static(staticmethod):  # type: ignore[type-arg]  # noqa: N801  # not subscriptable
    """A static method of a module class whose argument ``module`` or ``model`` is the instance if it is left out.

    torch's class has had such methods in both forms: ``model.summon_full_params()`` was a method in torch 1.11, and is
    ``FullyShardedDataParallel.summon_full_params(model)`` today.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        names = [*inspect.signature(function).parameters]
        self._name = next(name for name in names if name in ("module", "model"))
        self._index = names.index(self._name)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        function: Callable[..., Any] = self.__func__
        if instance is None:
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get(self._name, args[self._index] if len(args) > self._index else None)
            if isinstance(given, nn.Module):
                return function(*args, **kwargs)
            if len(args) < self._index:
                return function(*args, **{self._name: instance, **kwargs})
            return function(*args[: self._index], instance, *args[self._index :], **kwargs)

        return call
