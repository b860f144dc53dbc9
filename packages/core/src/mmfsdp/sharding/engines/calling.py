"""Finds the modules of a shard unit that are called, and keeps their class names after sharding."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mmfsdp.planning.compiled import is_compiled
from mmfsdp.planning.policies import own_parameters
from mmfsdp.planning.units import has_forward

__all__ = ["called_parts", "keep_class_name"]


def called_parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose calls begin and end the use of a unit's parameters.

    That is the unit's module, unless it is an ``nn.Sequential`` that is not compiled: vision models often iterate over
    one (``for layer in self.layers``) and never call it. Its children are called either way.

    Args:
        module: A module of a unit; all units below it are sharded already.
    """
    if not _only_holds(module) or is_compiled(module):
        return [module]
    return list({id(part): part for part in _parts(module)}.values()) or [module]


def _only_holds(module: nn.Module) -> bool:
    """Return whether a module has no parameters of its own, and only calls its children in turn or is never called."""
    runs_in_turn = type(module).forward is nn.Sequential.forward
    return (runs_in_turn or not has_forward(module)) and not own_parameters(module)


def _parts(container: nn.Module) -> list[nn.Module]:
    parts = []
    for child in container.children():
        if isinstance(child, FSDPModule):
            continue
        if _only_holds(child):
            parts += _parts(child)
        elif any(not isinstance(param, DTensor) for param in child.parameters()):
            parts.append(child)
    return parts


def keep_class_name(module: nn.Module) -> None:
    """Give the class that ``fully_shard`` made the name of the original, for imports and messages.

    transformers uses ``str(type(model))`` to look up which outputs, such as hidden states, a model can record.

    Args:
        module: A module that was just sharded.
    """
    sharded = type(module)
    original = sharded.__mro__[2]  # torch makes it as class FSDPName(FSDPModule, Name)
    sharded.__module__, sharded.__qualname__ = original.__module__, original.__qualname__
    sharded.__name__ = original.__name__
