"""Explains a name that no registry has: near names, the registries that were searched, and what to write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mmengine.registry import DefaultScope, Registry

from mmfsdp.errors import ConfigError, closest
from mmfsdp_mmengine.configs.packages import to_install, what_to_install

__all__ = ["UnknownNameError", "check_known", "unknown_name", "unknown_type", "why_scope_fails"]


class UnknownNameError(ConfigError, KeyError):
    """A ``type`` that no registry has. A KeyError too, which MMEngine raises and callers may catch."""


def check_known(config: Any, registry: Registry, path: str) -> None:
    """Raise if a config's ``type`` is a name that the registry does not have.

    Args:
        config: A config, or any other value, which is accepted. Not changed.
        registry: Where to look the name up.
        path: Dotted path of the config.

    Raises:
        UnknownNameError: The registry does not have it.
    """
    name = config.get("type") if isinstance(config, Mapping) else None
    if isinstance(name, str) and registry.get(name) is None:
        raise unknown_name(name, registry, f"{path}.type")


def unknown_name(name: str, registry: Registry, config: str | None = None) -> UnknownNameError:
    """Return the error for a name that a registry does not have.

    Args:
        name: The name, with or without a scope.
        registry: The registry that was asked.
        config: Dotted path of the setting, if known.
    """
    searched, others = _searched(name, registry)
    bare = name.rpartition(".")[2]
    hints = closest(bare, [known for one in searched for known in one.module_dict])
    elsewhere = [one.scope for one in others if bare in one.module_dict]
    if elsewhere:
        hints = "".join(f" Scope {scope!r} has it: write {f'{scope}.{bare}'!r}." for scope in elsewhere)
    elif not hints:
        near = ((one.scope, closest(bare, one.module_dict)) for one in others)
        hints = "".join(f" Scope {scope!r} was not searched.{hint}" for scope, hint in near if hint)
    looked = ", ".join(f"{one.scope}::{one.name}" for one in searched)
    if not searched:
        scopes = ", ".join(repr(one.scope) for one in others)
        looked = f"no scope, as {name.partition('.')[0]!r} is none of {scopes}"
    cause = why_scope_fails(name, registry) or _why_without_registry(name, registry)
    cause = cause and f" {cause}"
    advice = cause or (
        " If the class is yours, list the module that registers it in custom_imports. If it belongs to a package, "
        f"install the package and write 'scope.{bare}' or set default_scope."
    )
    return UnknownNameError(
        f"{name} is not in the {registry.scope}::{registry.name} registry. Looked in {looked}{_as_import(name)}."
        f"{hints}{advice}",
        config=config,
    )


def unknown_type(registry: Registry, config: Any, default_args: Any = None) -> UnknownNameError | None:
    """Return the error for a config whose ``type`` the registry does not have, or None if that is not the problem.

    Args:
        registry: The registry that builds the config.
        config: A config with a ``type``, or a list of configs. Not changed.
        default_args: Defaults for arguments that the config leaves out.
    """
    if isinstance(config, list | tuple):
        return next(filter(None, (unknown_type(registry, item, default_args) for item in config)), None)
    if not hasattr(config, "get"):
        return None
    name = config.get("type") or (default_args or {}).get("type") or config.get("runner_type")
    if not isinstance(name, str):
        return None
    with registry.switch_scope_and_registry(config.get("_scope_")) as known:
        return unknown_name(name, known) if known.get(name) is None else None


def _searched(name: str, registry: Registry) -> tuple[list[Registry], list[Registry]]:
    """Return the registries in which MMEngine looks for a name, and the other registries of their tree."""
    tree = [*_tree(registry.root)]
    scope, _ = Registry.split_scope_key(name)
    if scope is not None:
        searched = [one for one in tree if one.scope == scope]
    else:
        searched = [registry]
        while searched[-1].parent is not None:
            searched.append(searched[-1].parent)
    return searched, [one for one in tree if one not in searched]


def _tree(registry: Registry) -> Iterator[Registry]:
    yield registry
    children: Mapping[str, Registry] = registry.children
    for child in children.values():
        yield from _tree(child)


def _as_import(name: str) -> str:
    return f", and tried to import it as {name!r}" if "." in name else ""


def why_scope_fails(name: str, registry: Registry) -> str:
    """Return why the package of a name's scope, or else of the default scope, gives no registry; empty if it does.

    It is empty as well for a scope that is no package, see `unknown_name`.
    """
    said, scope = _scope_without_registry(name, registry)
    if scope is None:
        return ""
    if (command := to_install(scope)) is not None:
        return f"{said} {scope!r}, but that package is not installed ({command})."
    if not _is_package(scope):
        return ""
    try:
        import_module(f"{scope}.registry")  # as MMEngine did, which does not say why it failed
    except Exception as error:  # importing a package may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == f"{scope}.registry":
            return f"{said} {scope!r}, but that package has no module {scope}.registry, which makes a scope of it."
        return (
            f"{said} {scope!r}: that package is installed, and importing it failed with {type(error).__name__}: "
            f"{error}. {what_to_install(error) or 'Repair or reinstall the package.'}"
        )
    return ""


def _why_without_registry(name: str, registry: Registry) -> str:
    """Return that the scope of a name, or else the default scope, is no package; empty if it is one."""
    said, scope = _scope_without_registry(name, registry)
    if scope is None or _is_package(scope):
        return ""
    return (
        f"{said} {scope!r}, but no module of that scope is imported. No package has that name: correct it, or "
        "list the module that registers the scope's classes in custom_imports."
    )


def _scope_without_registry(name: str, registry: Registry) -> tuple[str, str | None]:
    """Return the scope of a name, or else the default scope, after how to call it; None for one with a registry."""
    scope, _ = Registry.split_scope_key(name)
    current = DefaultScope.get_current_instance()
    said = "The scope of the name is" if scope else "default_scope is"
    scope = scope or (None if current is None else current.scope_name)
    return said, None if scope is None or any(one.scope == scope for one in _tree(registry.root)) else scope


def _is_package(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module that is no package, as __main__
        return False
