"""Imports a public name when it is first used, so importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from mmfsdp.basics.torch_version import require_torch

__all__ = ["lazy"]


def lazy(
    package: str,
    public: Collection[str],
    where: Mapping[str, str],
    name: str,
    default: str | None = None,
    needs_torch: Collection[str] = (),
) -> Any:
    """Return a package's public attribute, imported now and remembered; for a module's ``__getattr__``.

    Args:
        package: The package's name.
        public: The names that it exports.
        where: The module of each name.
        name: The name to look up.
        default: Module of the names that ``where`` does not list.
        needs_torch: The names whose modules import torch.

    Raises:
        AttributeError: ``name`` is not exported.
        MissingTorchError: ``name`` needs torch, and torch is not installed or too old.
    """
    module = where.get(name, default)
    if name not in public or module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    if name in needs_torch:
        require_torch(f"{package}.{name}")
    value = getattr(importlib.import_module(module), name)
    setattr(sys.modules[package], name, value)
    return value
