"""Explains errors inside a sharded model's forward in terms of the user's modules."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import clean_fqn
from mmfsdp.planning.mesh import MODEL_AXES, axis_of
from mmfsdp.planning.plan_records import ParamEntry, ShardUnit
from mmfsdp.runtime.sharded_model import ShardedModel

__all__ = ["explain_forward_error"]

_HEADS = ("q_proj", "k_proj", "v_proj")
_WRITTEN = re.compile(r"\baten\.[a-z]\w*_\.")  # operators that work in place


def explain_forward_error(error: BaseException, state: ShardedModel) -> None:
    """Add a note to ``error`` if code read parameters of a unit that was not gathered. Not collective.

    Module calls gather the parameters that they need. What remains is code that reads weights outside of a forward: a
    unit's method that the plan does not list, or another module.

    Args:
        error: The exception of a forward; the note is added to it.
        state: The model's state.
    """
    if "dtype" in str(error) and (moved := _converted(state)):
        error.add_note(moved)
        return
    if "shape" in str(error) and (cut := _cut_heads(state)):
        error.add_note(cut)
        return
    if not state.is_fsdp1 and "DTensor" not in str(error):
        return
    if _WRITTEN.search(str(error)):
        error.add_note(
            "mmfsdp: code wrote parameters in a forward, while some were gathered and others were shards. Write them "
            "inside `with torch.no_grad(), mmfsdp.sharded_params(...)`, which takes the modules that own them."
        )
        return
    names = {id(module): clean_fqn(f"{fqn}.").rstrip(".") for fqn, module in state.module.named_modules()}
    calls = traceback.walk_tb(error.__traceback__)
    frames = [*zip(calls, traceback.extract_tb(error.__traceback__), strict=True)][::-1]
    found = [
        (
            frame,
            _source(entry),
            {name: names[id(value)] for name, value in frame.f_locals.items() if id(value) in names},
        )
        for (frame, _), entry in frames
    ]
    # Code that knows a module says more than code that was passed the module's parameters.
    for frame, source, known in sorted(found, key=lambda each: not each[-1]):
        read = [name for name in _read(state, frame, source, known) if _is_in_pieces(state, name)]
        if read:
            module, reader = frame.f_locals.get("self"), "code"
            if id(module) in names:
                reader = f"{names[id(module)] or '(root)'!r} ({type(module).__name__})"
            reader = f"{reader} computed in {frame.f_code.co_name}()"
            error.add_note(f"mmfsdp: {reader} with {_note(error, state, names, read)}")
            return


def _converted(state: ShardedModel) -> str | None:
    """Return a note if parameters have another dtype than the one that they were sharded in."""
    for param in state.plan.all_params():
        stored, found = state.plan.storage_dtype or param.dtype, _value(state, param.fqn)
        if isinstance(found, DTensor) and str(found.dtype) != f"torch.{stored}":
            return (
                f"mmfsdp: {param.fqn!r} was sharded in {stored} and has been converted to {found.dtype} since, which "
                "torch allows only before the first forward. Convert the model before shard(), or set "
                "precision.storage_dtype."
            )
    return None


def _cut_heads(state: ShardedModel) -> str | None:
    """Return a note if tensor parallelism gives a rank a part of an attention head."""
    for param in state.plan.all_params():
        parts = state.plan.mesh.axes.get("tensor", 1)
        owner, _, layer = param.fqn.rpartition(".")[0].rpartition(".")
        size = getattr(state.module.get_submodule(owner), "head_dim", None) if layer in _HEADS else None
        if ("tensor", 0) not in param.divided or not isinstance(size, int) or param.shape[0] % size:
            continue
        if -(-param.shape[0] // parts) % size:
            return (
                f"mmfsdp: the axis 'tensor' divides {param.fqn!r} over {parts} ranks, which cuts a head: its heads, "
                f"{param.shape[0] // size} in all, have {size} rows each. Give each rank as many whole heads."
            )
    return None


def _note(error: BaseException, state: ShardedModel, names: dict[int, str], read: list[str]) -> str:
    unit = next(unit for unit in state.plan.units if any(read[0] in _names_of(param) for param in unit.params))
    name = unit.fqn or "(root)"
    leave_out = (
        f"change the wrap policy so that {name!r} is not a unit of its own "
        f"(exclude_wrap_modules=['{unit.class_name}'] in MMEngine's size policy)."
    )
    method = _entry(error, names, unit)
    if method in unit.forward_methods:
        why = f"the method {method!r} ran the unit's forward, which frees them when it ends"
        remedy = "Read them before that, or call the layer that holds them"
    else:
        why = "code other than the unit's forward reads them"
        remedy = f"List the method ({method!r})" if method else f"Read them in a method of {name!r}, listed"
        remedy += " in sharding.forward_methods"
    what = ", ".join(map(repr, read))
    return f"{what}, while the shard unit {name!r} was not gathered: {why}. {remedy}, or {leave_out}"


def _source(entry: traceback.FrameSummary) -> str:
    first = entry.lineno or 0
    return " ".join(
        linecache.getline(entry.filename, number) for number in range(first, (entry.end_lineno or first) + 1)
    )


def _read(state: ShardedModel, frame: FrameType, source: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of parameters that a line of code reads, as far as its text and frame show.

    Args:
        state: The model's state.
        frame: Its frame.
        source: Its text.
        modules: The FQNs of modules in its variables.
    """
    known = {name for param in state.plan.all_params() for name in _names_of(param)}
    held = {key: name for name in known if (key := _memory(_value(state, name))) is not None}
    found = [held[key] for value in frame.f_locals.values() if (key := _memory(value)) in held]
    for variable, chain in re.findall(r"\b(\w+)((?:\.\w+|\[\d+\])+)", source):
        if (fqn := modules.get(variable)) is None:
            continue
        steps = re.sub(r"\[(\d+)\]", r".\1", chain).strip(".").split(".")
        # A suffix such as .T is not part of the parameter's name.
        found += [".".join([*([fqn] if fqn else []), *steps[:end]]) for end in range(1, len(steps) + 1)]
    yield from dict.fromkeys(name for name in found if name in known)


def _memory(value: Any) -> int | None:
    """Return what identifies a parameter, and for a shard what its views and its ``.data`` have in common with it."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local().untyped_storage().data_ptr() or id(value)
    return id(value) if isinstance(value, torch.Tensor) else None


def _value(state: ShardedModel, name: str) -> Any:
    owner, _, own = name.rpartition(".")
    return getattr(state.module.get_submodule(owner), own, None)


def _is_in_pieces(state: ShardedModel, name: str) -> bool:
    """Return whether a module that expects the whole parameter sees only a shard, or nothing."""
    value = _value(state, name)
    if isinstance(value, DTensor):  # tensor parallelism keeps a gathered parameter on its own axis
        return not {*map(axis_of, value.device_mesh.mesh_dim_names or ("",))} <= {*MODEL_AXES}
    if not isinstance(value, torch.Tensor):
        return state.is_fsdp1
    [shape] = [param.shape for param in state.plan.all_params() if name in _names_of(param)]
    # With use_orig_params=False it is a view of memory that was freed.
    return value.shape != shape or value.untyped_storage().size() < value.numel() * value.element_size()


def _entry(error: BaseException, names: dict[int, str], unit: ShardUnit) -> str | None:
    """Return the method of a unit's module that was called from outside and led to the error, if there is one."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, name = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(module, nn.Module) and names.get(id(module)) in unit.fqns:
            if name == "wrapped_method":  # torch's register_fsdp_forward_method adds it; the method itself comes next
                continue
            return None if unit.is_root or name == "forward" or hasattr(nn.Module, name) or name == "inner" else name
    return None


def _names_of(param: ParamEntry) -> tuple[str, ...]:
    return (param.fqn, *param.aliases)
