"""Measures two functions in turn, so that a noisy machine slows both; and how far memory rises."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

__all__ = [
    "DEVICE",
    "MB",
    "QUICK",
    "Peak",
    "Ratio",
    "Spread",
    "memory",
    "paired",
    "peak_of",
    "sized",
    "spread",
    "timed",
]

T = TypeVar("T")

MB = 1e6
QUICK = "MMFSDP_BENCH_QUICK"
"""Environment variable that ``--quick`` sets; the ranks that a benchmark starts inherit it."""
DEVICE = "MMFSDP_BENCH_DEVICE"
"""Environment variable that ``--device`` sets."""


def sized(full: T, quick: T) -> T:
    """Return a benchmark's setting: ``full``, or ``quick`` where it only has to be shown that the benchmark runs."""
    return quick if os.environ.get(QUICK) else full


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


@dataclass(frozen=True)
class Peak:
    """How far memory rose above where it was, in MB, as ``/proc/self/status`` says it."""

    private: float
    """``RssAnon``, sampled: what a process alone holds."""
    resident: float
    """``VmHWM``: the peak of all that is resident."""
    seconds: float


def memory(field: str) -> int:
    """Return a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_of(function: Callable[[], object]) -> Peak:
    """Call ``function`` and return how far memory rose."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    private, resident = memory("RssAnon"), memory("VmRSS")
    highest = private
    over = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not over.is_set():
            highest = max(highest, memory("RssAnon"))
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    seconds = timed(function)
    over.set()
    thread.join()
    return Peak((highest - private) / MB, (memory("VmHWM") - resident) / MB, seconds)
