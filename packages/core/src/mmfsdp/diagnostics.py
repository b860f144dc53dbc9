"""Saying what went wrong inside a sharded model, in terms of the user's modules."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import torch.nn as nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from mmfsdp.planning.schema import ShardUnit
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
    if not state.is_fsdp1 and "DTensor" not in str(error):
        return
    from mmfsdp.runtime import clean_fqn  # needs this module

    names = {id(module): clean_fqn(f"{fqn}.").rstrip(".") for fqn, module in state.module.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module) or id(module) not in names:
            continue
        fqn = names[id(module)]
        sharded = _flattened(state, module, fqn) if state.is_fsdp1 else _sharded(module)
        if not sharded:
            continue
        unit = _unit_of(state, f"{fqn}.{sharded[0]}".lstrip("."))
        leave_out = f"change the wrap policy so that {unit.fqn or '(root)'!r} is no unit of its own"
        if state.is_fsdp1:
            remedy = (
                f"With engine 'fsdp1', {leave_out} (exclude_wrap_modules=['{unit.class_name}'] in a size policy); or "
                "use engine 'fsdp2', which has sharding.forward_methods."
            )
        else:
            method = _entry(error, names, unit)
            remedy = f"List the method{f' ({method!r})' if method else ''} in sharding.forward_methods, or {leave_out}."
        error.add_note(
            f"mmfsdp: {fqn or '(root)'!r} ({type(module).__name__}) computed in {frame.f_code.co_name}() with its "
            f"parameters {', '.join(sharded)} while their shard unit {unit.fqn or '(root)'!r} was not gathered: "
            "something outside the unit calls a method of it other than forward, or reads its weights. "
            f"{remedy}"
        )
        return


def _sharded(module: nn.Module) -> list[str]:
    return [name for name, param in module._parameters.items() if isinstance(param, DTensor)]


def _flattened(state: ShardedModel, module: nn.Module, fqn: str) -> list[str]:
    """Parameters of which FSDP1 shows a piece, or nothing, where the module expects the whole."""
    found = []
    for param in state.plan.all_params():
        for name in (param.fqn, *param.aliases):
            owner, _, own = name.rpartition(".")
            if owner == fqn and getattr(getattr(module, own, None), "shape", None) != param.shape:
                found.append(own)
    return found


def _entry(error: BaseException, names: dict[int, str], unit: ShardUnit) -> str | None:
    """The method of a unit's own module that was called from outside, if that is how it came to the error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, name = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(module, nn.Module) and names.get(id(module)) in unit.fqns:
            return None if unit.is_root or name == "forward" or hasattr(nn.Module, name) or name == "inner" else name
    return None


def _unit_of(state: ShardedModel, fqn: str) -> ShardUnit:
    for unit in state.plan.units:
        for param in unit.params:
            if fqn == param.fqn or fqn in param.aliases:
                return unit
    return state.plan.units[-1]
