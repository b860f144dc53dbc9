"""Checks that a checkpoint can bring an optimizer's state back, before any of it is written."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmfsdp.basics.nested import nested_values
from mmfsdp.errors import StateDictError
from mmfsdp.state.optimizers.compressed import is_compressed, plain_value

__all__ = ["check_savable", "may_belong"]

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    datetime.date,
    datetime.time,
    datetime.timedelta,
)
_INSTEAD = (
    "Save the model without the optimizer, whose state then begins anew; or use an optimizer whose state is numbers "
    "and tensors of its parameters' shapes."
)


def check_savable(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Check that what an optimizer keeps is what loading can give back. Not collective.

    That is: tensors of the parameter's shape, sharded as the parameter is or compressed; other tensors that are whole
    on every rank; numbers, and lists, tuples and dicts of these. Settings of param groups may also be text.

    Args:
        optimizer: The optimizer.
        names: The FQNs of its parameters by ``id()``.

    Raises:
        StateDictError: It keeps something else; the message names it.
    """
    kind = type(optimizer).__name__
    for param, entries in optimizer.state.items():
        if not isinstance(param, torch.Tensor) or not isinstance(entries, Mapping):
            raise StateDictError(f"{kind} keeps a state for {param!r}, which is not a parameter. {_INSTEAD}")
        for name, value in entries.items():
            for path, leaf in nested_values(name, value):
                if reason := _refused(leaf, param, is_entry=leaf is value):
                    fqn = names.get(id(param), "")
                    raise StateDictError(
                        f"{kind} keeps {path!r} of a parameter as {reason}, which no checkpoint can bring back. "
                        f"{_INSTEAD}",
                        fqn=fqn,
                    )
    for number, group in enumerate(optimizer.param_groups):
        for path, leaf in nested_values("", {key: value for key, value in group.items() if key != "params"}):
            if reason := _refused(leaf, None, is_entry=False):
                raise StateDictError(
                    f"{kind} keeps the setting {path!r} of param group {number} as {reason}, which no checkpoint can "
                    "bring back. Set it to a number or text while saving."
                )


def may_belong(shape: Sequence[int], param_shape: Sequence[int]) -> bool:
    """Return whether a tensor of an optimizer's state may belong to a parameter, as far as shapes tell.

    Tensors of as many dimensions have the parameter's shape, or are sums along some of them, such as Adafactor's.
    """
    if len(shape) != len(param_shape) or math.prod(shape) == 1:
        return True
    return all(size in (1, whole) for size, whole in zip(shape, param_shape, strict=True))


def _refused(value: Any, param: torch.Tensor | None, *, is_entry: bool) -> str:
    """Return what a value is if it cannot be loaded, else an empty string."""
    kind = f"a {type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, DTensor):
        if param is None or not is_entry:
            return "a DTensor within a list, tuple or dict"
        if not isinstance(param, DTensor) or value.shape != param.shape or value.placements != param.placements:
            return f"a DTensor of shape {tuple(value.shape)}, placed as {value.placements}, unlike the parameter"
    if isinstance(value, torch.Tensor):
        if not is_compressed(value):
            local = value.to_local() if isinstance(value, DTensor) else value
            if is_entry and param is not None and not may_belong(value.shape, param.shape):
                return f"a tensor of shape {tuple(value.shape)}, unlike the parameter"
            return "" if type(local) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) else kind
        if not is_entry or value.shape != getattr(param, "shape", None):
            return f"{kind} that has not the parameter's shape"
        try:
            plain_value(value)
        except Exception as error:
            return f"{kind} that cannot be copied into a plain tensor ({error})"
        return ""
    if param is not None and isinstance(value, Iterable):
        return f"{kind}, which torch's load_state_dict() rebuilds from its elements and so changes"
    if isinstance(value, _PLAIN) or type(value).__module__ == "numpy":
        return ""
    return f"{kind} object"
