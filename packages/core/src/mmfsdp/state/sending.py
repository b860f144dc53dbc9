"""Sends the first rank's optimizer state to all ranks: the structure first, then tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.basics.nested import map_values
from mmfsdp.basics.optimizer_forms import STATE, unflattened
from mmfsdp.collective.broadcasting import broadcast_tensor
from mmfsdp.collective.steps import broadcast_object, on_all_ranks
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.state.lazy_tensors import LazyTensor, whole_value

__all__ = ["check_whole", "send_optim_state"]


def check_whole(name: str, value: Any) -> None:
    """Check that the first rank has all of a value that it shall send. Not collective.

    Args:
        name: What the state dict calls it, for the message.
        value: The value.

    Raises:
        StateDictError: It is a DTensor, and other ranks hold parts of it.
    """
    if isinstance(value, DTensor):
        raise StateDictError(
            f"from_rank0=True sends whole tensors, and {name!r} is a shard. Leave out from_rank0, and pass each rank's "
            "own state dict."
        )


def send_optim_state(state_dict: Any, state: ShardedModel) -> dict[str, Any]:
    """Return the first rank's state on every rank. Collective: every rank.

    Args:
        state_dict: An optimizer's state in any form, with whole or lazy tensors; ignored on other ranks. Not changed.
        state: The model's state.

    Raises:
        StateDictError: The first rank's ``state_dict`` is not an optimizer's state, or holds shards; raised on every
            rank.
        CheckpointError: The first rank cannot read a lazy tensor; raised on every rank.
    """
    scope = state.scope
    structure, mine = on_all_ranks(lambda: _taken_apart(state_dict) if scope.is_first else ({}, {}), scope)
    skeleton = broadcast_object(scope, structure)
    device = next(iter(state.module.parameters())).device if state.mesh.device_type != "cpu" else torch.device("cpu")

    def send(key: Any, name: str, sent: _Sent) -> torch.Tensor:
        def prepare() -> torch.Tensor:
            if scope.is_first:
                value: torch.Tensor = whole_value(mine[key, name])
                return value.to(device).contiguous()
            return torch.empty(sent.shape, dtype=getattr(torch, sent.dtype), device=device)

        tensor = on_all_ranks(prepare, scope)  # a disk may fail, or memory run out, on one rank
        broadcast_tensor(tensor, state.mesh)
        return tensor

    received = {
        key: {name: send(key, name, entry) if isinstance(entry, _Sent) else entry for name, entry in own.items()}
        for key, own in skeleton[STATE].items()
    }
    return {**skeleton, STATE: received}


class _Sent:
    """Stands for a tensor that is sent later."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype


def _taken_apart(state_dict: Any) -> tuple[dict[str, Any], dict[tuple[Any, str], torch.Tensor | LazyTensor]]:
    """Return a state whose tensors are replaced, and the tensors."""
    if not isinstance(state_dict, Mapping) or STATE not in (state_dict := unflattened(state_dict)):
        raise StateDictError(
            f"The first rank must pass an optimizer's state with 'state' and 'param_groups', got a "
            f"{type(state_dict).__name__} without them."
        )
    tensors: dict[tuple[Any, str], torch.Tensor | LazyTensor] = {}
    rest = {key: value for key, value in state_dict.items() if key != STATE}
    skeleton: dict[str, Any] = {**_read(rest), STATE: {}}
    for key, entries in state_dict[STATE].items():
        skeleton[STATE][key] = {}
        for name, value in entries.items():
            check_whole(f"{key}.{name}", value)
            if isinstance(value, torch.Tensor | LazyTensor):
                tensors[key, name] = value
                value = _Sent(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            skeleton[STATE][key][name] = _read(value)
    return skeleton, tensors


def _read(content: Any) -> Any:
    """Return content whose lazy tensors are read: those within lists and settings are few and small."""
    return map_values(whole_value, content)
