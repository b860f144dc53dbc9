"""Refuses a backward with ``create_graph=True`` through a shard unit: its graph would need weights that are freed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.param_groups import Group, around, name_of

__all__ = ["refuse_second_order"]


def refuse_second_order(group: Group) -> None:
    """Raise in a backward with ``create_graph=True`` that reaches the unit. Not collective.

    A unit is gathered for its backward and freed right after it. The backward of that backward reads the weights again,
    at a point where torch has no hook: it fails, or ends the process.

    Args:
        group: The unit's parameter group.
    """
    around(group, "pre_backward", functools.partial(_checking, name_of(group)))


def _checking(unit: str, pre_backward: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_gather(*args: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward only with create_graph
            raise ShardStateError(
                f"A backward with create_graph=True, as in a gradient penalty, reached the shard unit {unit!r}: the "
                "weights are freed after it, and the second backward would read them. Keep the modules whole that are "
                "differentiated twice: list them in sharding.ignored_modules. Their gradients are averaged over ranks."
            )
        return pre_backward(*args)

    return check_and_gather
