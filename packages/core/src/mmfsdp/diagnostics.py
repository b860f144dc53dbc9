"""Saying what went wrong inside a sharded model, in terms of the user's modules."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import torch.nn as nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from mmfsdp.runtime import ShardedModel

__all__ = ["explain_forward_error"]


def explain_forward_error(error: BaseException, state: ShardedModel) -> None:
    """Add a note to ``error`` if a module used parameters of a unit that was not gathered.

    That happens when code outside a shard unit uses its parameters: a method other than ``forward`` is called, or
    a weight is read directly.

    Args:
        error: What forward raised; changed by a note.
        state: The model.
    """
    if "DTensor" not in str(error):
        return
    names = {id(module): fqn for fqn, module in state.module.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module) or id(module) not in names:
            continue
        sharded = [name for name, param in module._parameters.items() if isinstance(param, DTensor)]
        if not sharded:
            continue
        fqn = names[id(module)]
        unit = _unit_of(state, f"{fqn}.{sharded[0]}".lstrip("."))
        error.add_note(
            f"mmfsdp: {fqn or '(root)'!r} ({type(module).__name__}) computed in {frame.f_code.co_name}() with its "
            f"parameters {', '.join(sharded)} while their shard unit {unit!r} was not gathered: something outside the "
            f"unit calls a method of it other than forward, or reads its weights. List the method in "
            f"sharding.forward_methods, or change the wrap policy so that {unit!r} is no unit of its own."
        )
        return


def _unit_of(state: ShardedModel, fqn: str) -> str:
    for unit in state.plan.units:
        for param in unit.params:
            if fqn == param.fqn or fqn in param.aliases:
                return unit.fqn or "(root)"
    return "(root)"
