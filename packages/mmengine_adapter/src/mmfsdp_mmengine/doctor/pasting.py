"""Writes config lines to paste, which extend or change a config and keep its other settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmfsdp_mmengine.doctor.subject import Subject

__all__ = ["changed_lines", "extended_hooks", "extended_imports", "replaced_line"]

OURS = "mmfsdp_mmengine"


def changed_lines(subject: Subject, path: str, values: Mapping[str, Any], removed: Collection[str] = ()) -> str:
    """Return lines that change some settings of a dict in the config.

    Where the file, or a config in Python style that it reads, assigns the name, the lines change its dict. A dict of
    ``_base_`` has no name in the file: there the line is a dict that MMEngine merges with it.

    Args:
        subject: The config.
        path: Dotted path of the dict, such as ``'strategy.model_wrapper'``; its missing parts are added.
        values: The new values, by name.
        removed: Names to remove.
    """
    name, *keys = path.split(".")
    removed = [key for key in removed if key not in values]
    node: Any = subject.settings.get(name)
    if not isinstance(node, Mapping) or subject.inherits(name):
        return f"{name} = {_written(_merged(node, keys, values, removed))}"
    target, rest = name, list(keys)
    while rest and isinstance(node.get(rest[0]), Mapping):
        node, target = node[rest[0]], f"{target}[{rest.pop(0)!r}]"
    lines = [f"{target}.pop({key!r})" for key in removed if not rest and key in node]
    new: Mapping[str, Any] = dict(values)
    for key in reversed(rest):
        new = {key: new}
    if new:
        lines.append(f"{target}.update({_arguments(new)})")
    return "\n".join(lines)


def replaced_line(subject: Subject, name: str, value: Mapping[str, Any]) -> str:
    """Return the line that replaces a setting's dict and inherits nothing."""
    return f"{name} = {_written({'_delete_': True, **value} if subject.inherits(name) else value)}"


def extended_imports(settings: Mapping[str, Any]) -> str:
    """Return ``custom_imports`` with this package first, then the config's own imports."""
    given = settings.get("custom_imports") or {}
    imports = given.get("imports") or []
    others = [imports] if isinstance(imports, str) else [*imports]
    every = [OURS, *(name for name in others if name != OURS)]
    return f"custom_imports = dict(imports={every!r}, allow_failed_imports=False)"


def extended_hooks(subject: Subject, hook: str) -> str:
    """Return ``custom_hooks`` with one more hook.

    The line has the whole list, because MMEngine replaces a list of ``_base_``. A config in Python style has the list
    as a name.

    Args:
        subject: The config.
        hook: The hook's type.
    """
    new = {"type": hook}
    given = subject.settings.get("custom_hooks") or []
    if subject.written is not None and given:
        return f"custom_hooks = [*custom_hooks, {_written(new)}]"
    return f"custom_hooks = {_written([*given, new])}"


def _merged(node: Any, keys: list[str], values: Mapping[str, Any], removed: Collection[str]) -> dict[str, Any]:
    """Return what MMEngine merges with the dict of a base; a dict that loses names replaces the base's."""
    if keys:
        inner = node.get(keys[0]) if isinstance(node, Mapping) else None
        return {keys[0]: _merged(inner, keys[1:], values, removed)}
    if not isinstance(node, Mapping) or not any(key in node for key in removed):
        return dict(values)
    return {"_delete_": True, **{key: node[key] for key in node if key not in removed}, **values}


def _arguments(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_written(item)}" for key, item in value.items())


def _written(value: Any) -> str:
    """Return a config value as configs write it: ``dict(type='EMAHook')``."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key.isidentifier() for key in value):
            return f"dict({_arguments(value)})"
        return "{" + ", ".join(f"{key!r}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    return repr(value)
