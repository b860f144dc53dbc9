"""Compiles modules in place as a plan says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.basics.references import resolve_reference
from mmfsdp.errors import ConfigError, closest
from mmfsdp.planning.plan_records import CompilePlan, ShardUnit
from mmfsdp.planning.schema import ShardPlan

__all__ = ["check_backend", "compile_unit"]


def check_backend(plan: CompilePlan) -> Any:
    """Return what ``torch.compile`` takes as the backend.

    Raises:
        ConfigError: There is no backend of that name.
    """
    if ":" in plan.backend:
        return resolve_reference(plan.backend)
    known = torch.compiler.list_backends(exclude_tags=())
    if plan.backend not in known:
        raise ConfigError(
            f"torch has no compiler backend {plan.backend!r}.{closest(plan.backend, known)} It has: "
            f"{', '.join(known)}; 'package.module:function' names another.",
            config="compile.backend",
        )
    return plan.backend


def compile_unit(modules: Iterable[nn.Module], unit: ShardUnit, plan: ShardPlan) -> None:
    """Compile the calls of a unit's modules in place, if the plan says so. Not collective.

    Call it after activation checkpointing and before the unit is sharded: a compiler cannot gather its own module.

    Args:
        modules: The modules of the unit that are called.
        unit: The unit.
        plan: The plan.
    """
    how = plan.compile
    if how is None or unit.fqn not in how.fqns:
        return
    for module in modules:
        module.compile(backend=check_backend(how), mode=how.mode, fullgraph=how.fullgraph, dynamic=how.dynamic)
