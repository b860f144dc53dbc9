"""Advises wrapper arguments for a config that shards nothing: a policy that leaves little of the model in the root."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch.nn as nn

from mmfsdp import ShardPlan, plan

__all__ = ["ROOT_SHARE", "advised_wrapper", "root_share"]

ROOT_SHARE = 0.2
"""The largest part of a model's parameters that advice leaves in the root unit, which a step gathers as a whole."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def root_share(planned: ShardPlan) -> float:
    """Return the part of a plan's parameters that its root unit holds, from 0 to 1."""
    return planned.root.numel / max(planned.param_numel, 1)


def advised_wrapper(model: nn.Module | None) -> dict[str, object]:
    """Return wrapper arguments with a policy: ``auto``, and large modules by name where it leaves much in the root.

    Args:
        model: The model; its parameters may be on the meta device. None if it could not be built.
    """
    if model is None:
        return {"auto_wrap_policy": "auto"}
    if model not in _advised:
        _advised[model] = _policy(model)
    return {"auto_wrap_policy": _advised[model]}


_advised: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()  # several findings ask, and large models take long


def _policy(model: nn.Module) -> object:
    automatic = plan(model, {"wrap": "auto"}, 1)
    names = _largest(model, automatic) if root_share(automatic) > ROOT_SHARE else []
    if not names:
        return "auto"
    named: dict[str, Any] = {"kind": "module_name", "patterns": names}
    return named if len(automatic.units) == 1 else {"kind": "any_of", "policies": ["auto", named]}


def _largest(model: nn.Module, planned: ShardPlan) -> list[str]:
    """Return the names of the modules that hold most of the root unit, until the rest is small enough.

    Modules that own parameters are chosen one by one: their forward runs wherever their parameters are used. A module
    with parameters that other code uses, such as an attention's output projection, goes with the one around it.
    """
    held: Counter[str] = Counter()
    for param in planned.root.params:
        owner = _owner(model, param.fqn)
        if owner:
            held[owner] += param.numel
    left, limit, names = planned.root.numel, ROOT_SHARE * planned.param_numel, []
    for name, numel in held.most_common():
        if left <= limit:
            break
        names.append(name)
        left -= numel
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return sorted(names, key=order.__getitem__)


def _owner(model: nn.Module, fqn: str) -> str:
    name = fqn.rpartition(".")[0]
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), nn.MultiheadAttention):
            return ".".join(parts[:depth])
    while name and isinstance(model.get_submodule(name), _LISTS):
        name = name.rpartition(".")[0]
    return name
