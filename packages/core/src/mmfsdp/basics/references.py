"""Checks references such as ``'package.module:attribute'`` when a config is read, and imports them on use."""

from __future__ import annotations

import importlib
import re
from typing import Any

from mmfsdp.errors import ConfigError, PolicyNotFoundError, closest

__all__ = ["check_reference", "resolve_reference"]

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:|\.)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def check_reference(text: str) -> str:
    """Return ``text`` if it has the form of a reference. Nothing is imported.

    Args:
        text: ``'package.module:attribute'`` or ``'package.module.attribute'``.

    Raises:
        ConfigError: ``text`` has another form.
    """
    if not isinstance(text, str) or _REFERENCE.fullmatch(text) is None:
        raise ConfigError(
            f"{text!r} is not a reference. Write 'package.module:attribute', for example "
            "'torch.distributed.fsdp.wrap:size_based_auto_wrap_policy'."
        )
    return text


def resolve_reference(text: str) -> Any:
    """Import the module of a reference and return its attribute.

    Args:
        text: ``'package.module:attribute'``, or with a dot in place of the colon.

    Raises:
        ConfigError: ``text`` does not have the form of a reference.
        PolicyNotFoundError: The module cannot be imported or lacks the attribute; the message suggests names.
    """
    check_reference(text)
    module_name, separator, attribute = text.partition(":")
    if not separator:
        module_name, _, attribute = text.rpartition(".")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PolicyNotFoundError(
            f"{text!r} cannot be resolved: no module named {error.name!r}. Install it, or correct the reference."
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise PolicyNotFoundError(
                f"{text!r} cannot be resolved: {getattr(target, '__name__', target)!r} has no attribute {part!r}."
                + closest(part, [name for name in dir(target) if part.startswith("_") or not name.startswith("_")])
            )
        target = getattr(target, part)
    return target
