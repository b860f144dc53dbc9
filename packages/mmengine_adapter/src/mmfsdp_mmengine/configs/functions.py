"""Functions that configs name: in MMEngine's registries, in ours, or by where they can be imported from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn
from mmengine.registry import FUNCTIONS

from mmfsdp.basics import resolve_reference
from mmfsdp.errors import ConfigError, MmfsdpError, PolicyNotFoundError, closest
from mmfsdp.planning import match_classes
from mmfsdp_mmengine.registry import FSDP_WRAP_POLICIES

__all__ = ["build_check_fn", "build_function", "build_policy", "find_function"]

# Arguments of torch's policies that hold module classes, and whether the model must have them.
_CLASSES = {
    "transformer_layer_cls": True,
    "module_classes": True,
    "exclude_wrap_modules": False,
    "force_leaf_modules": False,
}
_DECLARED = ("none", "size")


def find_function(name: str, argument: str) -> Any:
    """Return what ``name`` stands for.

    Args:
        name: A name in MMEngine's FUNCTIONS (the current scope's and the root's) or in `FSDP_WRAP_POLICIES`, or
            ``'package.module:attribute'``, with a dot or a colon.
        argument: Which argument names it, for the message.

    Raises:
        PolicyNotFoundError: Nothing has that name; the closest names are given.
    """
    with FUNCTIONS.switch_scope_and_registry(None) as functions:
        places = [FSDP_WRAP_POLICIES, functions]
        while places[-1].parent is not None:
            places.append(places[-1].parent)
        # A dotted name that is none makes `get` import its way along: only registries are asked here.
        bare = name.rpartition(".")[2] if name.count(".") == 1 and ":" not in name else name
        for place in places:
            if name in place.module_dict:
                return place.module_dict[name]
            if bare in place.module_dict and name.startswith(f"{place.scope}."):
                return place.module_dict[bare]
        if "." not in name and (found := functions.get(name)) is not None:
            return found
    looked = "Looked in " + ", ".join(f"{place.scope}::{place.name}" for place in places)
    if "." in name or ":" in name:
        try:
            return resolve_reference(name)
        except MmfsdpError as error:
            raise PolicyNotFoundError(
                f"{argument} {name!r} is not known. {looked}; and as a reference: {error.message}", config=argument
            ) from error
    names = [key for place in places for key in place.module_dict]
    raise PolicyNotFoundError(
        f"{argument} {name!r} is not known. {looked}.{closest(name, names)} Register it with "
        "@FUNCTIONS.register_module(), with its module in custom_imports, or write 'package.module:function'.",
        config=argument,
    )


def build_function(value: Any, argument: str) -> Callable[..., Any] | None:
    """Return a function from any form that a config gives it in.

    Args:
        value: A callable, a name, ``dict(type=name or callable, **arguments to bind)``, or None. Not changed.
        argument: Which argument it is, for messages.

    Raises:
        PolicyNotFoundError: It is named and not found.
        ConfigError: It is none of these, or does not take the arguments.
    """
    if value is None:
        return None
    bound: dict[str, Any] = {}
    target = value
    if isinstance(value, Mapping):
        bound = dict(value)
        target = _type_of(bound, argument)
    if isinstance(target, str):
        target = find_function(target, argument)
    if not callable(target):
        raise ConfigError(
            f"{argument} is a function, its name, or dict(type=..., **arguments), got {value!r} "
            f"(type {type(value).__name__}).",
            config=argument,
        )
    return _bind(target, bound, argument) if bound or inspect.isclass(target) else target


def build_check_fn(value: Any) -> Callable[[nn.Module], bool] | None:
    """Return an activation checkpointing ``check_fn`` as a function of one module; see `build_function`."""
    check = build_function(value, "activation_checkpointing.check_fn")
    if check is None:
        return None

    def check_fn(module: nn.Module) -> bool:
        answer: bool = check(module)
        return answer

    named = check.func if isinstance(check, functools.partial) else check
    check_fn.__name__ = getattr(named, "__name__", type(named).__name__)
    return check_fn


def build_policy(value: Any, module: nn.Module, argument: str = "auto_wrap_policy") -> Any:
    """Return a wrapping policy that core takes, from any form that a config gives it in.

    Args:
        value: A callable or policy object; a name; ``'size'`` or ``'none'``; ``dict(type=name or callable, **arguments
            to bind)``, where classes may be named and policies and functions nested; ``dict(kind=...)`` with a
            declared policy's fields; or None. Not changed.
        module: The model, in which named classes are looked up.
        argument: Which argument it is, for messages.

    Raises:
        PolicyNotFoundError: It is named and not found.
        PolicyError: A class is named that the model does not have.
        ConfigError: It is none of these, or does not take the arguments.
    """
    if value is None or hasattr(value, "_run_policy"):
        return value
    if isinstance(value, str) and value in _DECLARED:
        return {"kind": value}
    if isinstance(value, Mapping):
        if "kind" in value and "type" not in value:
            return value
        arguments = {key: _policy_argument(key, given, module, argument) for key, given in value.items()}
        return build_function(arguments, argument)
    return build_function(value, argument)


def _policy_argument(key: str, value: Any, module: nn.Module, argument: str) -> Any:
    if key in _CLASSES:
        items = [value] if isinstance(value, str | type) else list(value)
        named = [item for item in items if isinstance(item, str)]
        found = match_classes(named, dict(module.named_modules()), config=f"{argument}.{key}", must_match=_CLASSES[key])
        return {*found, *(item for item in items if not isinstance(item, str))}
    if key == "lambda_fn":
        return build_function(value, f"{argument}.{key}")
    if key == "policies":
        return [build_policy(item, module, f"{argument}.{key}") for item in value]
    return value


def _type_of(arguments: dict[str, Any], argument: str) -> Any:
    if "type" not in arguments:
        raise ConfigError(
            f"{argument} as a dict needs a 'type': the name of a function, or the function itself. It has "
            f"{', '.join(map(repr, arguments)) or 'nothing'}.",
            config=argument,
        )
    return arguments.pop("type")


def _bind(target: Callable[..., Any], arguments: dict[str, Any], argument: str) -> Callable[..., Any]:
    """A class is called for an object, a function gets its arguments bound."""
    name = getattr(target, "__name__", repr(target))
    signature = inspect.signature(target)
    try:
        if isinstance(target, type):
            signature.bind(**arguments)
        else:
            signature.bind_partial(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{argument}: {name}{signature} does not take what is given: {error}.", config=argument
        ) from None
    bound: Callable[..., Any] = (
        target(**arguments) if isinstance(target, type) else functools.partial(target, **arguments)
    )
    return bound
