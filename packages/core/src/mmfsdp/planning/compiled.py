"""Finds modules that the user compiled, and the wrappers around a module that are compiled together with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn

from mmfsdp.planning.policies.matching import own_parameters

__all__ = ["around_compiled", "compiled_around", "is_compiled", "is_compiled_wrapper", "unwrap_compiled"]


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
    """Replace the compiled call of a module by what ``wrap`` makes of it, which runs outside of the graph.

    Args:
        module: A compiled module; its forward is replaced if ``torch.compile()`` returned it.
        wrap: A function from a call to another one.
    """
    if is_compiled_wrapper(module):
        module.forward = wrap(module.forward)
    else:
        module._compiled_call_impl = wrap(module._compiled_call_impl)  # type: ignore[arg-type]


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
