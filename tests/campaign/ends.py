"""Compares how a run ended with how one without faults did: weights, optimizer, random numbers, order of samples."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import torch

__all__ = ["compare", "numbers_of_ranks", "steps_done"]

ROUNDING = 1e-6
"""How much a number may differ on other ranks, absolutely and relatively: float32 has an eps of 1.2e-7."""


def compare(whole: Path, folder: Path, *, steps: int, elastic: bool) -> tuple[str, float]:
    """Return how a run differs from the one without faults, or nothing, and the largest difference of numbers."""
    if missing := [name for name in ("order-0", "end-0") if not (folder / name).exists()]:
        return f"{missing[0]} is missing", float("inf")
    if order(folder, steps) != order(whole, steps):
        return "the samples of the steps differ", float("inf")
    largest = 0.0
    for rank in range(1 if elastic else 2):
        expected, found = (torch.load(place / f"end-{rank}") for place in (whole, folder))
        if elastic:  # each rank's random numbers begin anew on other ranks
            expected, found = expected[:3], found[:3]
        else:
            try:
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
            except AssertionError as error:
                return f"rank {rank}: {error}", float("inf")
        largest = max(largest, *(_distance(*pair) for pair in zip(leaves(found), leaves(expected), strict=True)))
    return f"a number differs by {largest:.2g}" if largest > ROUNDING else "", largest


def leaves(tree: Any) -> list[Any]:
    """Return all that a nested dict, list or tuple holds; a dict's values in the order of their keys."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree, key=str) for leaf in leaves(tree[key])]
    return [leaf for item in tree for leaf in leaves(item)] if isinstance(tree, list | tuple) else [tree]


def _distance(found: Any, expected: Any) -> float:
    """Return the largest difference of numbers, relative where they are larger than 1."""
    if isinstance(expected, float):
        found, expected = torch.tensor(found), torch.tensor(expected)
    if not isinstance(expected, torch.Tensor):
        return 0.0 if found == expected else float("inf")
    found, expected = found.double(), expected.double()
    return float(((found - expected).abs() / expected.abs().clamp_min(1.0)).max())


def order(folder: Path, steps: int) -> dict[int, list[int]]:
    """Return the samples of each step in the order of all ranks together; where a step was done again, the last ones.

    Of a batch, rank r of n has every n-th sample from the r-th on.
    """
    by_rank = [{step: (ranks, rest) for step, ranks, *rest in lines} for lines in _lines(folder)]
    found = {}
    for step in sorted(by_rank[0])[:steps]:
        ranks = by_rank[0][step][0]
        found[step] = [
            sample for row in zip(*(by_rank[rank][step][1] for rank in range(ranks)), strict=True) for sample in row
        ]
    return found


def steps_done(folder: Path) -> int:
    """Return how many steps the first rank has done, those that were done again included."""
    return len(_lines(folder)[0])


def numbers_of_ranks(folder: Path) -> list[int]:
    """Return on how many ranks a run went on, one after the other."""
    return [ranks for ranks, _ in groupby(ranks for _, ranks, *_ in _lines(folder)[0])]


def _lines(folder: Path) -> list[list[list[int]]]:
    """Return what each rank wrote in its steps; a killed one may have left half a line."""
    found = []
    for file in sorted(folder.glob("order-?")):
        found.append([[*map(int, line.split())] for line in file.read_text().splitlines() if line])
    return found
