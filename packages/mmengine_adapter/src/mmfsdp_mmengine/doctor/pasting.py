"""Writes config lines to paste that extend what a config has, and lose nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmfsdp_mmengine.doctor.subject import Subject

__all__ = ["extended_hooks", "extended_imports"]

OURS = "mmfsdp_mmengine"


def extended_imports(settings: Mapping[str, Any]) -> str:
    """Return ``custom_imports`` with this package first, then what the config imports already."""
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


def _written(value: Any) -> str:
    """Return a config value as configs write it: ``dict(type='EMAHook')``."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key.isidentifier() for key in value):
            return f"dict({', '.join(f'{key}={_written(item)}' for key, item in value.items())})"
        return "{" + ", ".join(f"{key!r}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    return repr(value)
