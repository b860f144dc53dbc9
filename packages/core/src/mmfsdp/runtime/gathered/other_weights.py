"""Refuses `functional_call` with other weights: torch ignores them, or, if the model has not run yet, keeps them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import stateless

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.fsdp1.flat_params import around_flat_forward
from mmfsdp.runtime.torch_fsdp2.gathering import replaced_in
from mmfsdp.runtime.torch_fsdp2.iterations import before_first_use
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, subscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group

__all__ = ["in_functional_call", "refuse_other_flat_weights", "refuse_other_weights"]


def refuse_other_weights(root: nn.Module, groups: list[Group]) -> None:
    """Raise in a forward that computes with other weights than the groups'. Not collective.

    Args:
        root: The sharded root.
        groups: Its parameter groups of ``fully_shard``; none with engine ``fsdp1``.
    """
    fqns = {id(module): f"{fqn}." if fqn else "" for fqn, module in root.named_modules()}

    def check(groups: Iterable[Group]) -> None:
        _check([fqns.get(id(module), "") + name for group in groups for module, name in replaced_in(group)])

    subscribe(_RefuseOtherWeights(check), groups)
    if isinstance(root, FSDPModule):
        before_first_use(root, lambda: check(groups))


class _RefuseOtherWeights(Subscriber):
    """Checks the weights of each unit that computes."""

    turn = Turn.REFUSING

    def __init__(self, check: Callable[[Iterable[Group]], None]) -> None:
        self._check = check

    def before_forward(self, group: Group) -> None:
        self._check([group])


def refuse_other_flat_weights(module: nn.Module) -> None:
    """Raise in a forward that computes with weights other than the flat parameters. Not collective.

    Args:
        module: A model with engine ``fsdp1``.
    """
    around_flat_forward(module, _checking)


def _checking(replaced: Callable[[], list[str]], method: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        _check(replaced())
        return method(*args, **kwargs)

    return check_and_call


def _check(replaced: list[str]) -> None:
    if replaced and in_functional_call():
        raise ShardStateError(
            f"functional_call() was given other weights for {replaced[0]!r}, which is sharded: a shard unit gathers "
            "its own weights, so these would be ignored, or kept for good. Write them into the model before the call "
            "and back after it: copy shards to shards under torch.no_grad(), or call mmfsdp.load_model_state_dict(). "
            "To replace only some parameters, keep their modules whole with sharding.ignored_modules.",
            fqn=replaced[0],
        )


def in_functional_call() -> bool:
    """Return whether `functional_call` runs, which registers other tensors for its time. Not collective."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == stateless.__file__:
            return True
        frame = frame.f_back
    return False
