"""Shows the shards of parameters within a forward, which computes with gathered copies, so that they can be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.errors import UnsupportedCallError
from mmfsdp.runtime.sharded_model import live_models
from mmfsdp.runtime.torch_fsdp2.gathering import free, gather
from mmfsdp.runtime.torch_fsdp2.param_groups import modules_of

__all__ = ["average_on_shards", "sharded_params"]


@contextmanager
def sharded_params(*modules: nn.Module) -> Iterator[None]:
    """Make every parameter of modules its shard, also while a forward runs, to change their values.

    A forward computes with gathered copies: values written to them are lost when they are freed. Models that change
    parameters in their forward, such as those with a momentum encoder, do so inside this context::

        with torch.no_grad(), sharded_params(self.encoder, self.momentum_encoder):
            for source, target in zip(self.encoder.parameters(), self.momentum_encoder.parameters()):
                target.lerp_(source, 1 - self.momentum)

    Parameters of equal shapes have shards of the same elements, whichever units they belong to, so that elementwise
    operations give the same values as on whole parameters. Inside, an assignment to ``.data`` of a shard copies; torch
    would ignore it. Parameters that were gathered before are gathered anew at the end.

    It has no effect on modules that are not sharded, or not yet, nor with engine ``replicate``: a model may use it
    wherever it trains. Collective in a forward: every rank that runs it. Otherwise not.

    Args:
        modules: Sharded models, modules of such, or containers that share modules with them.

    Raises:
        UnsupportedCallError: A module is sharded by engine ``fsdp1``, whose shards are parts of flat parameters.
        LostRankError: Other ranks that run the forward did not call it.
    """
    members = {member for module in modules for member in module.modules()}
    groups = []
    for state in live_models():
        if state.is_fsdp1:
            if not members.isdisjoint(state.module.modules()):
                raise UnsupportedCallError(
                    "Engine 'fsdp1' shards flat parameters, whose parts do not correspond to each other, so that a "
                    "forward cannot change parameters. Write engine 'fsdp2'."
                )
        else:
            groups += [group for group in state.groups if not members.isdisjoint(modules_of(group))]
    gathered = [group for group in groups if free(group)]
    try:
        with _AssignedData():
            yield
    finally:
        with Waiting("gathering parameters that a forward has changed"):
            for group in gathered:
                gather(group)


class _AssignedData(TorchFunctionMode):
    """Carries out ``shard.data = value``, which torch accepts and ignores."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and isinstance(args[0], DTensor):
            return args[0].detach().copy_(args[1].detach())
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


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
