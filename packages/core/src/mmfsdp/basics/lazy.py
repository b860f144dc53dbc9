"""Imports a public name when it is first used, so importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mmfsdp.basics.torch_version import require_torch
from mmfsdp.errors import MissingTorchAttributeError, MissingTorchError

__all__ = ["lazy"]


def lazy(
    package: str,
    public: Collection[str],
    where: Mapping[str, str],
    *,
    default: str | None = None,
    needs_torch: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__``, which imports a public name and remembers it, and its ``__dir__``.

    Args:
        package: The package's name.
        public: The names that it exports.
        where: The module of each name.
        default: Module of the names that ``where`` does not list.
        needs_torch: The names whose modules import torch. Without torch, ``hasattr`` is False for them, and both
            ``package.name`` and ``from package import name`` raise a `MissingTorchError`.
    """

    def getattr_(name: str) -> Any:
        module = where.get(name, default)
        if name not in public or module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in needs_torch:
            try:
                require_torch(f"{package}.{name}")
            except MissingTorchError as error:
                if _imported_by_name():
                    raise
                raise MissingTorchAttributeError(error.message) from None
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        found = vars(sys.modules[package])
        modules = {name for name in found if f"{package}.{name}" in sys.modules}
        return sorted({*public, *modules, *(name for name in found if name.startswith("__"))})

    return getattr_, dir_


def _imported_by_name() -> bool:
    """Tell whether the import system asks, for ``from package import name``.

    Python would replace an `AttributeError` by its own ``cannot import name``, without what to install.
    """
    return sys._getframe(2).f_code.co_name == "_handle_fromlist"
