"""Tells which modules are compiled: by the user, together with the wrappers around them, and by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn

from mmfsdp.basics.text import name_list
from mmfsdp.config import CompileConfig
from mmfsdp.errors import PlanError
from mmfsdp.planning.plan_records import CompilePlan, Note, ShardUnit
from mmfsdp.planning.policies.matching import own_parameters

__all__ = [
    "around_compiled",
    "compile_plan",
    "compiled_already",
    "compiled_around",
    "compiled_call",
    "is_compiled",
    "is_compiled_wrapper",
    "unwrap_compiled",
]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of ``module`` is compiled, by ``module.compile()`` or because it is a compiled wrapper."""
    return module._compiled_call_impl is not None or is_compiled_wrapper(module)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether ``torch.compile()`` returned ``module``; importing its class would import the compiler."""
    return "_orig_mod" in module._modules and type(module).__module__.startswith("torch._dynamo")


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that was given to ``torch.compile()``, or ``module`` itself if that did not return it."""
    inner = module._modules["_orig_mod"] if is_compiled_wrapper(module) else module
    assert inner is not None, "it is given a module"
    return inner


def around_compiled(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the compiled call of a module by ``wrap(call)``, which runs outside of the graph.

    Args:
        module: A compiled module; its forward is replaced if ``torch.compile()`` returned it.
        wrap: A function from a call to another one.
    """
    if is_compiled_wrapper(module):
        module.forward = wrap(module.forward)
    else:
        module._compiled_call_impl = wrap(compiled_call(module))


def compiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return the compiled call of a compiled module, or what `around_compiled` made of it."""
    call = module.forward if is_compiled_wrapper(module) else module._compiled_call_impl
    assert call is not None, "it is given a compiled module"
    return call


def compiled_around(module: nn.Module, parents: Mapping[int, list[nn.Module]]) -> nn.Module:
    """Return the outermost compiled module that computes nothing but ``module``, or ``module`` itself.

    Args:
        module: A module of a model.
        parents: The modules that hold each module, by its ``id``.
    """
    found = module
    above = parents.get(id(module), [])
    while len(above) == 1 and len(above[0]._modules) == 1 and not own_parameters(above[0]):
        if is_compiled(above[0]):
            found = above[0]
        above = parents.get(id(above[0]), [])
    return found


def compiled_already(model: nn.Module, units: tuple[ShardUnit, ...]) -> tuple[str, ...]:
    """Return the FQNs of the units' modules that the user compiled."""
    return tuple(fqn for unit in units for fqn in unit.fqns if is_compiled(model.get_submodule(fqn)))


def compile_plan(
    model: nn.Module, config: CompileConfig | None, units: tuple[ShardUnit, ...]
) -> tuple[CompilePlan | None, list[Note]]:
    """Return the plan of compilation, or None if nothing is compiled, and notes on it.

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
