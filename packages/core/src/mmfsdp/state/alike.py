"""Checks that ranks load states of one structure: else they would make different calls, and wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import all_equal, broadcast_object, on_all_ranks
from mmfsdp.errors import StateDictError
from mmfsdp.state.lazy_tensors import LazyTensor

__all__ = ["check_alike", "kind_of"]


def check_alike(kinds: Mapping[str, str], what: str, scope: Scope) -> None:
    """Check that all ranks have the same names, with values of the same kinds. Collective: every rank of the scope.

    Costs one reduction of sixteen bytes, whatever the number of ranks.

    Args:
        kinds: The kind of each value by name; see `kind_of`.
        what: What has them, for the message, such as ``"the optimizer's state"``.
        scope: The ranks that load it.

    Raises:
        StateDictError: They differ; raised on every rank.
    """
    if all_equal(scope, repr(sorted(kinds.items()))):
        return
    first = broadcast_object(scope, dict(kinds))

    def compare() -> None:
        for name in (*first, *kinds):
            theirs, mine = first.get(name, "nothing"), kinds.get(name, "nothing")
            if theirs != mine:
                raise StateDictError(
                    f"Ranks were given different states: for {name!r} of {what} the first rank has {theirs}, and this "
                    f"rank {mine}. Give every rank the same state, or only the first one, with from_rank0=True."
                )

    on_all_ranks(compare, scope)


def kind_of(value: Any, *, tells_shards: bool) -> str:
    """Return ``"a whole tensor"``, ``"a shard"``, ``"a tensor"`` or ``"another value"``. Not collective.

    Args:
        value: A value of a state.
        tells_shards: Whether it matters that a tensor is whole.
    """
    if not isinstance(value, (torch.Tensor, LazyTensor)):
        return "another value"
    if not tells_shards:
        return "a tensor"
    return "a shard" if isinstance(value, DTensor) else "a whole tensor"
