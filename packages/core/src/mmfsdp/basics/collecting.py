"""Keeps Python's garbage collector from looking through objects again and again that are no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collecting_off", "collecting_young"]

_NEVER = 1 << 30


@contextlib.contextmanager
def collecting_off() -> Iterator[None]:
    """Collect nothing: for code that makes many objects and no garbage in cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def collecting_young() -> Iterator[None]:
    """Collect what has just been made, and leave what was there before alone: for code that makes garbage in cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
