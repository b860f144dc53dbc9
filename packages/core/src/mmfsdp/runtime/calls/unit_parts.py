"""Finds the modules that belong to each shard unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn

from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.policies.matching import own_parameters
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.runtime.calls.ownership import modules_by_unit

__all__ = ["UnitParts", "parts_of_units"]


@dataclass(frozen=True, slots=True)
class UnitParts:
    """A unit's modules, as they are before sharding."""

    unit: ShardUnit
    modules: list[nn.Module]
    owned: list[nn.Module]
    """All modules of the unit, without those of units below it."""
    holders: list[nn.Module]
    """The owned modules that compute with the unit's parameters, without the unit's own modules."""


def parts_of_units(model: nn.Module, plan: ShardPlan) -> list[UnitParts]:
    """Return the modules of each unit. Not collective.

    Args:
        model: The model that the plan was made for, before sharding.
        plan: The plan.
    """
    named = dict(model.named_parameters())
    owned = modules_by_unit(model, plan)
    found = []
    for unit in plan.units:
        modules = [model.get_submodule(fqn) for fqn in unit.fqns]
        params = {id(named[param.fqn]) for param in unit.params}
        inside = [part for _, part in owned[unit.fqns]]
        found.append(UnitParts(unit, modules, inside, _holders(inside, modules, params)))
    return found


def _holders(owned: list[nn.Module], units: list[nn.Module], params: set[int]) -> list[nn.Module]:
    mine = {id(module) for module in owned}
    known: dict[int, bool] = {}

    def holds(module: nn.Module) -> bool:
        if id(module) not in known:
            known[id(module)] = False
            below = [holds(child) for child in module.children() if id(child) in mine]
            known[id(module)] = any(below) or any(id(param) in params for param in own_parameters(module))
        return known[id(module)]

    return [module for module in owned if holds(module) and module not in units]
