"""Tells whether autograd runs a backward, and which."""

from __future__ import annotations

import torch

__all__ = ["current_backward", "is_backward"]


def current_backward() -> int | None:
    """Return a number of the backward that runs on this thread, which no other backward has; None if there is none."""
    number = torch._C._current_graph_task_id()  # torch has no public name for it
    return None if number == -1 else number


def is_backward() -> bool:
    """Return whether a backward runs on this thread, also where it runs a forward again."""
    return current_backward() is not None
