"""Makes parts of a model that average other parts, such as a momentum encoder, do so on shards."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn as nn

from mmfsdp.runtime.sharded_params import sharded_params

__all__ = ["average_on_shards"]


def average_on_shards(model: nn.Module) -> None:
    """Make ``update_parameters(other)`` of modules inside a model compute on shards, also in a forward. Not collective.

    ``torch.optim.swa_utils.AveragedModel`` and the averaged models of MMEngine have this method.

    Args:
        model: The sharded model.
    """
    for module in model.modules():
        if module is not model and callable(getattr(type(module), "update_parameters", None)):
            vars(module)["update_parameters"] = _OnShards(module)


class _OnShards:
    """Replaces ``update_parameters`` of a module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        averaged = self.module
        sources = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        with sharded_params(averaged, *sources):
            return type(averaged).update_parameters(averaged, *args, **kwargs)

    def __reduce__(self) -> Any:
        # A copy of the module is a plain module, which updates itself.
        return MethodType, (type(self.module).update_parameters, self.module)
