"""Runs benchmarks on several ranks; apart from `measuring`, which has to stay without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.measuring import Ratio
from mmfsdp.testing import run_ranks

__all__ = ["compared_on_ranks"]


def compared_on_ranks(functions: Mapping[str, Callable[[int], Ratio]], ranks: int = 2) -> dict[str, Any]:
    """Run each function on all ranks, print the first rank's ratio under its name, and return all as plain data."""
    results = {}
    for name, function in functions.items():
        ratio: Ratio = run_ranks(function, ranks, timeout=300)[0]
        results[name] = ratio.to_dict()
        print(f"{name:40} ratio {ratio.ratio}; ours {ratio.ours} s, theirs {ratio.theirs} s", flush=True)
    return results
