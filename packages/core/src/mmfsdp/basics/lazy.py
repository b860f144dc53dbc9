"""Imports a public name when it is first used, so importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from typing import Any, cast

from mmfsdp.basics.torch_version import require_torch
from mmfsdp.errors import MissingTorchAttributeError, MissingTorchError

__all__ = ["lazy"]

_ONLY_PARSE = 0x400  # ast.PyCF_ONLY_AST: to import ast takes longer than to parse all stubs


def lazy(
    package: str,
    file: str,
    *,
    needs_torch: Collection[str] = (),
    without_torch: Collection[str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's ``__getattr__``, which imports a public name and remembers it; ``__dir__``; and ``__all__``.

    The public names are those that ``__init__.pyi`` beside the file imports: type checkers read the same list.

    Args:
        package: The package's name.
        file: The ``__file__`` of its ``__init__.py``.
        needs_torch: The names whose modules import torch. Without torch, ``hasattr`` is False for them, and both
            ``package.name`` and ``from package import name`` raise a `MissingTorchError`.
        without_torch: If given: the names whose modules do not import torch, where most do.
    """
    where = _listed(package, f"{file.rpartition('.py')[0]}.pyi")
    public = sorted({*where} | {"__version__"} & {*vars(sys.modules[package])}, key=_order_of)
    if without_torch is not None:
        needs_torch = {*where} - {*without_torch}

    def getattr_(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in needs_torch:
            try:
                require_torch(f"{package}.{name}")
            except MissingTorchError as error:
                if _imported_by_name():
                    raise
                raise MissingTorchAttributeError(error.message) from None
        value = getattr(importlib.import_module(where[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        found = vars(sys.modules[package])
        modules = {name for name in found if f"{package}.{name}" in sys.modules}
        return sorted({*public, *modules, *(name for name in found if name.startswith("__"))})

    return getattr_, dir_, public


def _listed(package: str, stub: str) -> dict[str, str]:
    """Return the names that a stub imports, and the module of each."""
    spec = sys.modules[package].__spec__
    assert spec is not None
    text = cast(Any, spec.loader).get_data(stub)  # also from an archive
    tree = cast(Any, compile(text, stub, "exec", _ONLY_PARSE))
    return {name.name: node.module for node in tree.body if hasattr(node, "module") for name in node.names}


def _order_of(name: str) -> tuple[int, str]:
    """Order constants before classes, and classes before functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _imported_by_name() -> bool:
    """Tell whether the import system asks, for ``from package import name``.

    Python would replace an `AttributeError` by its own ``cannot import name``, without what to install.
    """
    return sys._getframe(2).f_code.co_name == "_handle_fromlist"
