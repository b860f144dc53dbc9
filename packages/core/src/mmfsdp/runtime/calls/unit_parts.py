"""Finds the modules that belong to each shard unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn

from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.policies.matching import own_parameters
from mmfsdp.planning.schema import ShardPlan

__all__ = ["UnitParts", "modules_by_unit", "parts_of_units"]


@dataclass(frozen=True, slots=True)
class UnitParts:
    """A unit's modules, as they are before sharding."""

    unit: ShardUnit
    modules: list[nn.Module]
    owned: list[nn.Module]
    """All modules of the unit, without the modules of units below it."""
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


def modules_by_unit(model: nn.Module, plan: ShardPlan) -> dict[tuple[str, ...], list[tuple[str, nn.Module]]]:
    """Return the modules of each unit, by the unit's FQNs: each module once, children first, with its name.

    Args:
        model: The model that the plan was made for, before sharding.
        plan: The plan.
    """
    unit_of = {id(model.get_submodule(fqn)): unit.fqns for unit in plan.units for fqn in unit.fqns}
    owned: dict[tuple[str, ...], list[tuple[str, nn.Module]]] = {unit.fqns: [] for unit in plan.units}
    seen: set[int] = set()

    def visit(fqn: str, module: nn.Module, unit: tuple[str, ...]) -> None:
        unit = unit_of.get(id(module), unit)
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            visit(f"{fqn}.{name}" if fqn else name, child, unit)
        owned[unit].append((fqn, module))

    visit("", model, plan.root.fqns)
    return owned
