"""Finds the sharded models and shard units in a tree of modules, as torch's class does."""

from __future__ import annotations

import torch.nn as nn

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model, live_models

__all__ = ["fsdp_modules", "models_in", "part_of"]


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """Return the shard units in a tree of modules, outer ones first. Not collective.

    A root that is wrapped is returned as its wrapper. The other units are modules of your own, or with engine ``fsdp1``
    instances of torch's class.

    Args:
        module: A sharded model, a module that holds one, or a part of one.
        root_only: Return only roots.
    """
    within = models_in(module) or part_of(module)
    units = {id(unit) for state in within for unit in state.engine.units(state)}
    found: list[nn.Module] = []
    seen: set[int] = set()
    for part in module.modules():
        state = _state_of(part)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            found.append(part)
        elif state is None and not root_only and id(part) in units:
            found.append(part)
    return found


def models_in(module: nn.Module) -> list[ShardedModel]:
    """Return the sharded models that a module is, wraps or holds. Not collective."""
    states = (_state_of(part) for part in module.modules())
    return [*{id(state): state for state in states if state is not None}.values()]


def part_of(module: nn.Module) -> list[ShardedModel]:
    """Return the sharded models that contain a module. Not collective."""
    return [state for state in live_models() if any(part is module for part in state.module.modules())]


def _state_of(module: nn.Module) -> ShardedModel | None:
    try:
        return find_sharded_model(module)
    except ShardStateError:
        return None
