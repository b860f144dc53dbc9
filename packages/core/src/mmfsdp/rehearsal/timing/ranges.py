"""`Range`: a figure that is not known exactly."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CASES", "Range"]

CASES = ("worst", "usual", "best")


class Range(NamedTuple):
    """A figure as it may be, from what makes a step slow to what makes it fast."""

    worst: float
    usual: float
    best: float
