"""Replaces parameters that modules also keep elsewhere, such as in a list to update, once sharding replaced them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn as nn

from mmfsdp.basics.text import clean_fqn

__all__ = ["named_references", "replace_kept"]

_OWN = vars(nn.Module()).keys()


def named_references(model: nn.Module) -> dict[str, weakref.ref[nn.Parameter]]:
    """Return weak references to a model's parameters, by every FQN."""
    return {clean_fqn(name): weakref.ref(param) for name, param in model.named_parameters(remove_duplicate=False)}


def replace_kept(model: nn.Module, former: Mapping[str, weakref.ref[nn.Parameter]]) -> None:
    """Replace former parameters in the attributes of modules by the present ones of the same name. Not collective.

    Attributes that are parameters outside of the registry, and those that are dicts, lists or tuples of such, are
    replaced; objects that hold none are kept as they are.

    Args:
        model: The model, sharded.
        former: The result of `named_references` before.
    """
    present = {clean_fqn(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    new = {
        id(param): present[name]
        for name, reference in former.items()
        if (param := reference()) is not None and present.get(name, param) is not param
    }
    if not new:
        return
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if name not in _OWN and (replaced := _replaced(value, new)) is not value:
                vars(module)[name] = replaced


def _replaced(value: Any, new: Mapping[int, nn.Parameter]) -> Any:
    if isinstance(value, nn.Parameter):
        return new.get(id(value), value)
    if type(value) is dict and _any_of(value.values(), new):
        return {key: new.get(id(item), item) for key, item in value.items()}
    if type(value) in (list, tuple) and _any_of(value, new):
        return type(value)(new.get(id(item), item) for item in value)
    return value


def _any_of(values: Iterable[Any], new: Mapping[int, nn.Parameter]) -> bool:
    return any(id(value) in new for value in values)
