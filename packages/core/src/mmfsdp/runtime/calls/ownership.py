"""Assigns each module, and with it its parameters and buffers, to a shard unit."""

from __future__ import annotations

import torch.nn as nn

from mmfsdp.planning.schema import ShardPlan

__all__ = ["modules_by_unit"]


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
