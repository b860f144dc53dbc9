"""Raises an error where a unit of torch's FSDP1 is frozen, or no longer is, between a forward and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.flat_params import flat_handles

__all__ = ["refuse_late_freezing"]


def refuse_late_freezing(module: nn.Module) -> None:
    """From now on, raise in a backward if a unit was frozen, or no longer is, since the forward. Not collective.

    torch decides in forward whether the unit's gradients are reduced, and ends such a backward with an assertion.

    Args:
        module: The sharded root; without effect if it has no FullyShardedDataParallel.
    """
    handles = flat_handles(module)
    flats = [(name, weakref.ref(handle.flat_param)) for name, handle in handles]
    for place, (_, handle) in enumerate(handles):
        # The outermost unit begins: it checks also those that the backward does not reach.
        checked = flats if place == 0 else flats[place : place + 1]
        handle.prepare_gradient_for_backward = _checking(handle.prepare_gradient_for_backward, checked)


def _checking(prepare: Callable[[], None], flats: Sequence[tuple[str, weakref.ref[Any]]]) -> Callable[[], None]:
    def prepare_checked() -> None:
        for name, reference in flats:
            if (flat := reference()) is not None:
                _check(name, flat)
        prepare()

    return prepare_checked


def _check(name: str, flat: Any) -> None:
    # Since a forward with gradients: (AccumulateGrad, hook), or (hook,) if the unit was frozen in it.
    known = getattr(flat, "_post_backward_hook_state", None)
    if known is not None and len(known) != flat.requires_grad + 1:
        raise ShardStateError(
            f"requires_grad of the parameters of the shard unit {name or '(root)'!r} was set to {flat.requires_grad} "
            "between a forward and its backward, which engine 'fsdp1' cannot follow. Set it before the forward or "
            "after the backward, or use engine 'fsdp2'.",
            fqn=name,
        )
