"""Puts off Python's search for cyclic garbage while many small objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collection"]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Put the garbage collector off within.

    It starts each time the objects have grown by some, and looks at all of them: for the hundred thousand descriptions
    of a large checkpoint it takes three times as long as reading them. None of them is garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
