"""Makes ``torch.autocast`` for an accelerator cast tensors on the CPU as it would cast them there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["autocast_as_on"]

_WIDE = (
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "group_norm",
    "kl_div", "l1_loss", "layer_norm", "log_softmax", "mse_loss", "nll_loss", "normalize", "smooth_l1_loss", "softmax",
    "softmin", "softplus",
)  # fmt: skip
"""Functions that autocast computes in float32 on a GPU, but (except for some losses) not on the CPU, by
https://docs.pytorch.org/docs/stable/amp.html (CUDA ops that can autocast to float32)."""


@contextmanager
def autocast_as_on(accelerator: str) -> Iterator[None]:
    """Let ``torch.autocast(accelerator)`` cast CPU tensors, with that device's default dtype and float32 functions.

    Without such a device torch switches it off with a warning. The CPU's own autocast casts the same products and
    convolutions. Functions of ``torch.nn.functional`` that a GPU computes in float32 are replaced, so norms keep their
    inputs in float32; methods of tensors, such as ``x.softmax(-1)``, follow the CPU's rules.
    """
    original = torch.autocast.__init__

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == accelerator:
            device_type, dtype = "cpu", torch.get_autocast_dtype(accelerator) if dtype is None else dtype
        original(self, device_type, dtype, *args, **kwargs)

    functions = {name: getattr(F, name) for name in _WIDE}
    torch.autocast.__init__ = init  # type: ignore[method-assign]
    for name, function in functions.items():
        setattr(F, name, _in_float32(function))
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
        for name, function in functions.items():
            setattr(F, name, function)


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        wide = [_widened(value) for value in args]
        named = {name: _widened(value) for name, value in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            return function(*wide, **named)

    return run


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
