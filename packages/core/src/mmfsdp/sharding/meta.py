"""Builds a model without the memory of its parameters, for values that come from a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

__all__ = ["parameters_on_meta"]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers in this context on the meta device; tied ones stay tied.

    Buffers and all other tensors are real, unlike under ``torch.device("meta")``: constructors may read them.
    """
    known: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta or is_lazy(param):
            return param
        original, replacement = known.get(id(param), (None, None))
        if original is None or original() is not param or replacement is None:
            replacement = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            vars(replacement).update(vars(param))
            known[id(param)] = weakref.ref(param), replacement
        return replacement

    # The value that the hook returns replaces the parameter; torch annotates it as returning nothing.
    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
