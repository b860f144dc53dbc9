"""Tells when gradients are about to be clipped, and their norm."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["watch_clipping"]

_NAME = "clip_grad_norm_"
_MODULES = ("torch.nn.utils", "torch.nn.utils.clip_grad", "mmfsdp")


@contextmanager
def watch_clipping(before: Callable[[], None], after: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call functions around ``clip_grad_norm_`` of torch and of mmfsdp, wherever a loop calls it by its full name.

    Args:
        before: Is called before gradients are scaled.
        after: Gets their norm.
    """
    inside = False

    def watched(clip: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(clip)
        def clip_and_tell(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal inside
            if inside:  # ours may call torch's
                return clip(*args, **kwargs)
            inside = True
            try:
                before()
                norm = clip(*args, **kwargs)
                after(norm)
            finally:
                inside = False
            return norm

        return clip_and_tell

    replaced = []
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and (clip := getattr(module, _NAME, None)) is not None:
            setattr(module, _NAME, watched(clip))
            replaced.append((module, clip))
    try:
        yield
    finally:
        for module, clip in reversed(replaced):
            setattr(module, _NAME, clip)
