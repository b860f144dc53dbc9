"""Gives modules back what they saved with ``get_extra_state``: any value, or a tensor of any length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.steps import broadcast_object, on_all_ranks
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.lazy_tensors import whole_value

__all__ = ["EXTRA_STATE", "is_extra", "load_extra_states"]

EXTRA_STATE = "_extra_state"
"""The last part of the key that torch gives a module's extra state."""


def is_extra(name: Any) -> bool:
    """Return whether a key of a state dict belongs to an extra state."""
    return str(name).rpartition(".")[2] == EXTRA_STATE


def load_extra_states(state: ShardedModel, extra: Mapping[str, Any], *, from_rank0: bool) -> None:
    """Give each module its extra state back. Collective: every rank.

    Args:
        state: The model's state.
        extra: Extra states by key; lazy tensors are read, and must have been located.
        from_rank0: Use the first rank's extra states.

    Raises:
        CheckpointError: A rank cannot read a tensor; raised on every rank.
    """
    scope = state.scope
    values = on_all_ranks(lambda: {name: whole_value(value) for name, value in extra.items()}, scope)
    if from_rank0:
        values = broadcast_object(scope, values)
    # A module and FSDP1's wrapper around it have the same name; the module comes last.
    modules = {clean_fqn(f"{fqn}.").lstrip("."): module for fqn, module in state.module.named_modules()}

    def give_back() -> None:
        for name, value in values.items():
            owner = name.removesuffix(EXTRA_STATE)
            if owner in modules:
                modules[owner].set_extra_state(value)

    on_all_ranks(give_back, scope)  # a module may refuse it on one rank
