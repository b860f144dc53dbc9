"""Importing a public name when it is first used, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, public: Collection[str], where: Mapping[str, str], name: str, default: str | None = None) -> Any:
    """Return a package's public attribute, imported now and remembered; for a module's ``__getattr__``.

    Args:
        package: Name of the package that is asked.
        public: The names it exports.
        where: Name to module.
        name: What is asked for.
        default: Module of the names that ``where`` does not list.

    Raises:
        AttributeError: ``name`` is not exported.
    """
    module = where.get(name, default)
    if name not in public or module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    setattr(sys.modules[package], name, value)
    return value
