"""Selects the modules that are compiled, and reports those that the user compiled already."""

from __future__ import annotations

import torch.nn as nn

from mmfsdp.basics.text import name_list
from mmfsdp.config import CompileConfig
from mmfsdp.errors import PlanError
from mmfsdp.planning.compiled import is_compiled
from mmfsdp.planning.plan_records import CompilePlan, Note, ShardUnit

__all__ = ["compile_plan", "compiled_already"]


def compiled_already(model: nn.Module, units: tuple[ShardUnit, ...]) -> tuple[str, ...]:
    """Return the FQNs of the units' modules that the user compiled."""
    return tuple(fqn for unit in units for fqn in unit.fqns if is_compiled(model.get_submodule(fqn)))


def compile_plan(
    model: nn.Module, config: CompileConfig | None, units: tuple[ShardUnit, ...]
) -> tuple[CompilePlan | None, list[Note]]:
    """Return what is compiled, or None, and notes on it.

    Args:
        model: The model.
        config: The settings; None compiles nothing.
        units: The shard units, the root last.

    Raises:
        PlanError: Nothing is left to compile, or ``fullgraph=True`` and a unit has other units inside.
    """
    if config is None:
        return None, []
    done = set(compiled_already(model, units))
    chosen = [unit for unit in units if (config.root or not unit.is_root) and not done & {*unit.fqns}]
    if not chosen and not done:
        raise PlanError(
            "There is no shard unit below the root to compile. Give a wrap policy that makes units, or set "
            "compile.root to compile the whole model.",
            config="compile",
        )
    fqns = [fqn for unit in chosen for fqn in unit.fqns]
    every = {fqn for unit in units for fqn in unit.fqns if fqn}
    divided = [fqn or "(root)" for fqn in fqns if any(inner.startswith(f"{fqn}." if fqn else "") for inner in every)]
    notes = []
    if divided:
        text = "contain other shard units, which are gathered between compiled parts: a graph ends at each."
        if config.fullgraph:
            raise PlanError(
                f"compile.fullgraph=True needs units that are one graph, but {name_list(divided)} {text} "
                "Set it to False, wrap no modules inside of compiled ones (modules that compute in full precision are "
                "units of their own), or leave compile.root out.",
                config="compile.fullgraph",
            )
        notes.append(Note(kind="compile", text=text, fqns=tuple(divided)))
    return (
        CompilePlan(
            fqns=tuple(fqns),
            backend=config.backend,
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
        ),
        notes,
    )
