"""Lets modules change a state dict before it is loaded, as in ``load_state_dict()``: other sizes, older names."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.collective import Scope, all_equal, on_all_ranks
from mmfsdp.saving import read_whole

__all__ = ["adapted"]


def adapted(model: nn.Module, state_dict: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    """Return a state dict as the modules' own code for loading changes it. Collective: every rank of the scope.

    Modules change a state dict in hooks that run before ``load_state_dict()``, and in ``_load_from_state_dict``. The
    code runs with tensors of the meta device first: what it renames is not read. If it computes values, such as
    position embeddings of another size, it runs again with the tensors that it looked at.

    Args:
        model: The sharded model, without a wrapper around it.
        state_dict: Tensors, or references to tensors in a checkpoint. Not changed.
        scope: The ranks that load.

    Raises:
        Exception: Whatever a module's code raises; on ranks where it did not, an `MmfsdpError` that says which failed.
    """
    modules = [(f"{name}." if name else "", module) for name, module in model.named_modules() if _changes(module)]
    if not modules:
        return dict(state_dict)
    view = _View(state_dict)
    computes = _runs_into_values(modules, view)
    if not all_equal(scope, str(computes)) or computes:
        view = _View(state_dict, read_whole({name: state_dict[name] for name in view.shown}, scope))
        on_all_ranks(lambda: _run(modules, view), scope)
    return view.content()


def _changes(module: nn.Module) -> bool:
    return bool(_hooks(module)) or _overrides(module)


def _overrides(module: nn.Module) -> bool:
    return not type(module)._load_from_state_dict.__module__.startswith(_NOT_THEIRS)


def _hooks(module: nn.Module) -> dict[int, Any]:
    """Return a module's hooks without torch's and ours, which handle shards."""
    hooks: Mapping[int, Any] = module._load_state_dict_pre_hooks
    return {key: hook for key, hook in hooks.items() if not getattr(hook, "__module__", "").startswith(_NOT_THEIRS)}


_NOT_THEIRS = ("torch.", "mmfsdp.")


def _runs_into_values(modules: list[tuple[str, nn.Module]], view: _View) -> bool:
    """Run the code on meta tensors; return whether it needs values, or computed new tensors."""
    try:
        _run(modules, view)
    except Exception:  # the second run raises what is a mistake
        return True
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in view.content().values())


def _run(modules: list[tuple[str, nn.Module]], view: _View) -> None:
    for prefix, module in modules:
        hooks = module._load_state_dict_pre_hooks
        if not _overrides(module):
            for hook in _hooks(module).values():
                hook(view, prefix, {}, False, [], [], [])
            continue
        module._load_state_dict_pre_hooks = OrderedDict(_hooks(module))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own code follows, which cannot copy whole tensors into shards
                module._load_from_state_dict(view, prefix, {}, False, [], [], [])
        finally:
            module._load_state_dict_pre_hooks = hooks


class _View(dict[str, Any]):
    """A state dict that shows tensors in place of its content, and tracks which of them were only moved.

    Args:
        values: The state dict. Not changed.
        tensors: What to show instead, by key; by default tensors of the meta device.
    """

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> None:
        super().__init__(values)
        self.shown: dict[str, Any] = {}
        self._values, self._tensors = values, tensors

    def content(self) -> dict[str, Any]:
        """Return the state dict, in which every tensor that was shown is replaced by its content, under any key."""
        origins = {id(tensor): self._values[key] for key, tensor in self.shown.items()}
        return {key: origins.get(id(value), value) for key, value in super().items()}

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        replaced = value is not self._values.get(key)
        if replaced or not hasattr(value, "shape"):
            return value
        if key not in self.shown:
            given = torch.empty(value.shape, dtype=value.dtype, device="meta")
            self.shown[key] = given if self._tensors is None else self._tensors.get(key, given)
        return self.shown[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as the view shows it."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a value, and return it as the view shows it."""
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        super().pop(key)
        return value

    def items(self) -> Any:
        """Return the pairs as the view shows them."""
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        """Return the values as the view shows them."""
        return [self[key] for key in self]
