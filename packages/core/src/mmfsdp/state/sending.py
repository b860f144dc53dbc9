"""Sends the first rank's optimizer state to all ranks: the structure first, then tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmfsdp.basics.optimizer_forms import STATE, unflattened
from mmfsdp.collective.scopes import scope_of
from mmfsdp.collective.steps import broadcast_object, on_all_ranks
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.model import is_first_rank, send_from_first

__all__ = ["send_optim_state"]


def send_optim_state(state_dict: Any, state: ShardedModel) -> dict[str, Any]:
    """Return the first rank's state on every rank. Collective: every rank.

    Args:
        state_dict: An optimizer's state in any form, with whole tensors; ignored on other ranks. Not changed.
        state: The model's state.

    Raises:
        StateDictError: The first rank's ``state_dict`` is not an optimizer's state; raised on every rank.
    """
    first, scope = is_first_rank(state), scope_of(state.mesh)
    structure, mine = on_all_ranks(lambda: _taken_apart(state_dict) if first else ({}, {}), scope)
    skeleton = broadcast_object(scope, structure)
    device = next(iter(state.module.parameters())).device if state.mesh.device_type != "cpu" else torch.device("cpu")
    received: dict[Any, dict[str, Any]] = {}
    for place, entries in skeleton[STATE].items():
        received[place] = {}
        for name, value in entries.items():
            if isinstance(value, _Sent):
                tensor = (
                    mine[place, name].to(device).contiguous()
                    if first
                    else torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
                )
                send_from_first(tensor, state)
                received[place][name] = tensor
            else:
                received[place][name] = value
    return {**skeleton, STATE: received}


class _Sent:
    """Stands for a tensor that is sent later."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype


def _taken_apart(state_dict: Any) -> tuple[dict[str, Any], dict[tuple[Any, str], torch.Tensor]]:
    """Return a state whose tensors are replaced, and the tensors."""
    if not isinstance(state_dict, Mapping) or STATE not in (state_dict := unflattened(state_dict)):
        raise StateDictError(
            f"The first rank must pass an optimizer's state with 'state' and 'param_groups', got a "
            f"{type(state_dict).__name__} without them."
        )
    tensors: dict[tuple[Any, str], torch.Tensor] = {}
    skeleton: dict[str, Any] = {**state_dict, STATE: {}}
    for place, entries in state_dict[STATE].items():
        skeleton[STATE][place] = {}
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[place, name] = value
                value = _Sent(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            skeleton[STATE][place][name] = value
    return skeleton, tensors
