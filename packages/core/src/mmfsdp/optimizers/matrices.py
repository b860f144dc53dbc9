"""Divides parameters into matrices, and gives each matrix an owner; pure arithmetic."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmfsdp.errors import PlanError

__all__ = ["Matrix", "Span", "assign_owners", "matrices_of", "overlap"]

Span = tuple[int, int]
"""The first element of a range of a flattened tensor, and the one after its last."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix within a parameter: ``rows * columns`` elements of the flattened parameter from ``start`` on."""

    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.columns

    @property
    def span(self) -> Span:
        """The elements of the flattened parameter that are the matrix."""
        return self.start, self.start + self.numel


def matrices_of(shape: Sequence[int], *, parts: int = 1, is_stack: bool = False) -> list[Matrix]:
    """Return the matrices that a parameter consists of.

    Args:
        shape: The parameter's shape: of a matrix; of a convolution (out, in, kernel...), which is a matrix of out rows;
            or of a stack of matrices.
        parts: Matrices that are one below the other, as the fused weights of q, k and v. They have equally many rows.
        is_stack: Whether the first dimension counts matrices, as it does in weights of experts.

    Raises:
        PlanError: The shape cannot be divided so.
    """
    if len(shape) < 2 + is_stack:
        raise PlanError(
            f"A parameter of shape {tuple(shape)} is not a {'stack of matrices' if is_stack else 'matrix'}."
        )
    outer = shape[0] if is_stack else 1
    rows, columns = shape[is_stack], math.prod(shape[is_stack + 1 :])
    if rows % parts:
        raise PlanError(f"{rows} rows of a parameter of shape {tuple(shape)} cannot be divided into {parts} matrices.")
    size = rows // parts * columns
    return [Matrix(number * size, rows // parts, columns) for number in range(outer * parts) if size]


def assign_owners(costs: Sequence[float], ranks: int, loads: Sequence[float] | None = None) -> list[int]:
    """Return an owner for each matrix, so that the ranks have about equal work.

    The longest is assigned first, to the rank with the least work: at most 4/3 of the optimum (Graham, 1969).

    Args:
        costs: The work of each matrix, in any unit.
        ranks: Number of ranks.
        loads: The work that each rank has already. Default: none.
    """
    heap = [(load, rank) for rank, load in enumerate(loads or [0.0] * ranks)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = heapq.heappop(heap)
        owners[index] = rank
        heapq.heappush(heap, (load + costs[index], rank))
    return owners


def overlap(one: Span, other: Span) -> Span:
    """Return the elements that are in both spans; an empty span if there are none."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))
