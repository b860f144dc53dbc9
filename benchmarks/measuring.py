"""Timing two things side by side: in turn, pair by pair, so that a noisy machine is noisy for both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

__all__ = ["Ratio", "Spread", "paired", "spread", "timed"]


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some measurements."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g}, n={self.count})"


@dataclass(frozen=True)
class Ratio:
    """Two timings in seconds, and the ratio of each pair."""

    ours: Spread
    theirs: Spread
    ratio: Spread

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return plain data."""
        return asdict(self)


def spread(values: list[float]) -> Spread:
    """Return the median and the range."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def paired(ours: Callable[[], object], theirs: Callable[[], object], pairs: int, warmup: int = 2) -> Ratio:
    """Call both in turn, and return their times and the ratio ours / theirs of each pair."""
    for _ in range(warmup):
        ours()
        theirs()
    times = []
    for pair in range(pairs):
        # Whoever goes first may find colder caches: take turns.
        if pair % 2:
            other = timed(theirs)
            times.append((timed(ours), other))
        else:
            mine = timed(ours)
            times.append((mine, timed(theirs)))
    return Ratio(spread([a for a, _ in times]), spread([b for _, b in times]), spread([a / b for a, b in times]))
