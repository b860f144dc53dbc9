"""Converts the ShardedTensors that torch's `load_sharded_optimizer_state_dict` returns to DTensors or whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from mmfsdp.basics.optimizer_forms import STATE
from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.runtime.sharded_model import ShardedModel

__all__ = ["without_sharded_tensors"]


def without_sharded_tensors(state_dict: Any, state: ShardedModel) -> Any:
    """Return an optimizer's state without ShardedTensors. Collective if it has any: every rank.

    torch splits them over all ranks of the world along dimension 0. If the model is sharded in the same way, each rank
    keeps its part; otherwise they are gathered.

    Args:
        state_dict: The state. Not changed.
        state: The model's state.
    """
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(STATE), Mapping):
        return state_dict
    same = state.mesh.ndim == 1 and state.mesh.size() == dist.get_world_size()
    values = {
        name: {key: _converted(value, state, same) for key, value in entries.items()}
        for name, entries in state_dict[STATE].items()
    }
    return {**state_dict, STATE: values}


def _converted(value: Any, state: ShardedModel, same: bool) -> Any:
    if not (isinstance(value, torch.Tensor) and hasattr(value, "local_shards")):
        return value
    shape = value.size()
    shards = value.local_shards()
    if same:
        local = shards[0].tensor if shards else torch.empty(0, *shape[1:], dtype=value.dtype)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, state.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    whole = torch.zeros(shape, dtype=value.dtype, device=shards[0].tensor.device if shards else state.mesh.device_type)
    for shard in shards:
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = shard.tensor
    with Waiting("gathering the shards of an optimizer's state"):
        dist.all_reduce(whole)
    return whole
