"""Finds the functions that configs name, in MMEngine's registries, in ours, or by import path."""

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

# Arguments of torch's policies that hold module classes, and whether each class must be in the model.
_CLASSES = {
    "transformer_layer_cls": True,
    "module_classes": True,
    "exclude_wrap_modules": False,
    "force_leaf_modules": False,
}
_DECLARED = ("auto", "none", "size")


def find_function(name: str, argument: str) -> Any:
    """Return the function that ``name`` refers to.

    Args:
        name: A name in MMEngine's FUNCTIONS (the current scope's and the root's) or in `FSDP_WRAP_POLICIES`, or
            ``'package.module:attribute'``, with a dot or a colon.
        argument: The argument that holds the name, for the message.

    Raises:
        PolicyNotFoundError: No function has that name; the error suggests the nearest names.
    """
    with FUNCTIONS.switch_scope_and_registry(None) as functions:
        registries = [FSDP_WRAP_POLICIES, functions]
        while registries[-1].parent is not None:
            registries.append(registries[-1].parent)
        # Registry.get() would try to import a dotted name: look into the registries only.
        bare = name.rpartition(".")[2] if name.count(".") == 1 and ":" not in name else name
        for registry in registries:
            if name in registry.module_dict:
                return registry.module_dict[name]
            if bare in registry.module_dict and name.startswith(f"{registry.scope}."):
                return registry.module_dict[bare]
        if "." not in name and (found := functions.get(name)) is not None:
            return found
    looked = "Looked in " + ", ".join(f"{registry.scope}::{registry.name}" for registry in registries)
    if "." in name or ":" in name:
        try:
            return resolve_reference(name)
        except MmfsdpError as error:
            raise PolicyNotFoundError(
                f"{argument} {name!r} was not found. {looked}; and as an import path: {error.message}", config=argument
            ) from error
    names = [key for registry in registries for key in registry.module_dict]
    raise PolicyNotFoundError(
        f"{argument} {name!r} was not found. {looked}.{closest(name, names)} Register it with "
        "@FUNCTIONS.register_module() in a module that custom_imports lists, or write 'package.module:function'.",
        config=argument,
    )


def build_function(value: Any, argument: str) -> Callable[..., Any] | None:
    """Return the function that a config value describes.

    Args:
        value: A callable, a name, ``dict(type=name or callable, **arguments to bind)``, or None. Not changed.
        argument: The name of the argument, for messages.

    Raises:
        PolicyNotFoundError: No function has the given name.
        ConfigError: The value has another form, or the function does not accept the arguments.
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
            f"{argument} must be a function, its name, or dict(type=..., **arguments), got {value!r} "
            f"(type {type(value).__name__}).",
            config=argument,
        )
    return _bind(target, bound, argument) if bound or inspect.isclass(target) else target


def build_check_fn(value: Any) -> Callable[[nn.Module], bool] | None:
    """Return an activation checkpointing ``check_fn`` as a function of one module; see `build_function`."""
    check = build_function(value, "activation_checkpointing.check_fn")
    if check is None or hasattr(check, "_run_policy"):  # a policy, as auto_wrap_policy may be
        return check

    def check_fn(module: nn.Module) -> bool:
        answer: bool = check(module)
        return answer

    named = check.func if isinstance(check, functools.partial) else check
    check_fn.__name__ = getattr(named, "__name__", type(named).__name__)
    return check_fn


def build_policy(value: Any, module: nn.Module, argument: str = "auto_wrap_policy") -> Any:
    """Return the wrapping policy that a config value describes, in a form that core accepts.

    Args:
        value: A callable or policy object; a name; ``'auto'``, ``'size'`` or ``'none'``; ``dict(type=name or callable,
            **arguments to bind)``, where classes may be named and policies and functions nested; ``dict(kind=...)``
            with a declared policy's fields; or None. Not changed.
        module: The model, in which named classes are looked up.
        argument: The name of the argument, for messages.

    Raises:
        PolicyNotFoundError: No function has the given name.
        PolicyError: The model has no class of a given name.
        ConfigError: The value has another form, or the function does not accept the arguments.
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
            f"{argument} as a dict needs a 'type': a function or its name. The keys given are "
            f"{', '.join(map(repr, arguments)) or 'none'}.",
            config=argument,
        )
    return arguments.pop("type")


def _bind(target: Callable[..., Any], arguments: dict[str, Any], argument: str) -> Callable[..., Any]:
    """Call a class, or bind the arguments to a function."""
    name = getattr(target, "__name__", repr(target))
    signature = inspect.signature(target)
    known = signature.parameters
    if not any(item.kind is item.VAR_KEYWORD for item in known.values()):
        for key in arguments:
            if key not in known:
                raise ConfigError(
                    f"{argument}: {name}{signature} got an unexpected keyword argument {key!r}.{closest(key, known)}",
                    config=f"{argument}.{key}",
                )
    try:
        if isinstance(target, type):
            signature.bind(**arguments)
        else:
            signature.bind_partial(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{argument}: {name}{signature} does not accept these arguments: {error}.", config=argument
        ) from None
    bound: Callable[..., Any] = (
        target(**arguments) if isinstance(target, type) else functools.partial(target, **arguments)
    )
    return bound
