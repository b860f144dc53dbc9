"""Lets chosen modules, such as batch norm, compute in float32 inside a model of lower precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

__all__ = ["compute_in_full_precision", "in_full_precision"]

_LOW = (torch.float16, torch.bfloat16)


def compute_in_full_precision(module: nn.Module) -> None:
    """Cast low-precision inputs of ``module`` to float32, and its outputs back to the dtype of the inputs."""
    incoming: list[torch.dtype | None] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs, dtype = _up(args, kwargs)
        incoming.append(dtype)
        return args, kwargs

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return _back(output, incoming.pop() if incoming else None)

    # A compiler would compile them once for each module.
    module.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True)
    module.register_forward_hook(torch.compiler.disable(after))


def in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its low-precision arguments cast to float32, and its result cast back."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, dtype = _up(args, kwargs)
        return _back(function(*args, **kwargs), dtype)

    return call


def _up(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], torch.dtype | None]:
    found: list[torch.dtype] = []

    def up(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _LOW:
            found.append(value.dtype)
            return value.float()
        return value

    args, kwargs = tree_map(up, args), tree_map(up, kwargs)
    return args, kwargs, found[0] if found else None


def _back(output: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return output
    return tree_map(
        lambda value: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value,
        output,
    )
