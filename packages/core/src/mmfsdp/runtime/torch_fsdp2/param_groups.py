"""Finds the parameter groups of ``fully_shard``, and the parameters, modules and names of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from mmfsdp.basics.torch_releases import HAS_SEVERAL_GROUPS, torch_has

__all__ = [
    "Group",
    "groups_in_module",
    "groups_of",
    "modules_of",
    "name_of",
    "places_of",
    "reduces",
    "shards_of",
    "unit_of",
]

Group = Any
"""torch's ``FSDPParamGroup``; modules that are sharded together share one."""


def groups_in_module(module: FSDPModule) -> list[Group]:
    """Return the groups of a sharded module, without the groups of modules below it."""
    state = module._get_fsdp_state()
    if torch_has(HAS_SEVERAL_GROUPS):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def groups_of(modules: Iterable[nn.Module]) -> list[Group]:
    """Return the groups of sharded modules, each once."""
    found: dict[int, Group] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            found |= {id(group): group for group in groups_in_module(module)}
    return list(found.values())


def shards_of(group: Group) -> Iterator[nn.Parameter]:
    """Yield the sharded parameters of a group, also while gathered copies are registered."""
    for param in group.fsdp_params:
        yield param.sharded_param


def places_of(param: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that hold a parameter (an ``FSDPParam``), each with its own name there."""
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def modules_of(group: Group) -> Iterator[nn.Module]:
    """Yield the modules that hold a group's parameters, some repeatedly."""
    for param in group.fsdp_params:
        for module, _ in places_of(param):
            yield module


def name_of(group: Group) -> str:
    """Return the FQN of a group's module, or the FQNs of several modules joined by commas."""
    return unit_of(group) or "(root)"


def unit_of(group: Group) -> str:
    """Return the name of a group's shard unit as rehearsals have it: as `name_of`, but empty for the root."""
    return group._module_fqn or ""


def reduces(group: Group) -> bool:
    """Return whether the coming backward reduces the group's gradients (``set_requires_gradient_sync``)."""
    return bool(group.reduce_grads)
