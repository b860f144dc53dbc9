"""Functions of one whole matrix: Muon's orthogonalisation, and users' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmfsdp.planning.matrix_steps import muon_flops

__all__ = ["MUON", "MatrixFunction", "UpdateMatrix", "orthogonalise"]

UpdateMatrix = Callable[[torch.Tensor, dict[str, Any], Mapping[str, Any]], torch.Tensor]
"""``(matrix, state, settings)``: returns the update of a matrix, of the same shape and on the same device.

``matrix`` is the gradient with momentum, ``state`` a dict that the owner keeps for this matrix, ``settings`` the param
group. The weights change by the update times the negative step size.
"""


@dataclass(frozen=True, slots=True)
class MatrixFunction:
    """A function of one matrix, and the facts needed to run it on the rank that owns the matrix."""

    update: UpdateMatrix
    flops: Callable[[int, int, Mapping[str, Any]], float]
    """``(rows, columns, settings)``: FLOPs of one update, to give all ranks equal work."""
    step_size: Callable[[float, int, int, Mapping[str, Any]], float]
    """``(lr, rows, columns, settings)``: what the update is multiplied by."""
    dtype: torch.dtype | None = None
    """The dtype in which matrices and updates are sent; None is the gradient's."""


def orthogonalise(matrix: torch.Tensor, state: dict[str, Any], settings: Mapping[str, Any]) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1, in bfloat16.

    Newton-Schulz iterations with the coefficients, and in the order of operations, of ``torch.optim.Muon``, so that
    results are equal bit by bit. Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
    (2024).

    Args:
        matrix: (rows, columns), of any floating dtype.
        state: Not used.
        settings: ``ns_coefficients``, ``ns_steps`` and ``eps``.
    """
    a, b, c = settings["ns_coefficients"]
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.bfloat16()
    found = found.T if is_tall else found
    found = found / found.norm().clamp(min=settings["eps"])
    for _ in range(settings["ns_steps"]):
        gram = found @ found.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, polynomial, found, beta=a)
    return found.T if is_tall else found


def _flops(rows: int, columns: int, settings: Mapping[str, Any]) -> float:
    return float(muon_flops(rows, columns, settings["ns_steps"]))


def _step_size(lr: float, rows: int, columns: int, settings: Mapping[str, Any]) -> float:
    if settings["adjust_lr_fn"] == "match_rms_adamw":  # J. Liu et al., "Muon is Scalable for LLM Training" (2025)
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))


MUON = MatrixFunction(orthogonalise, _flops, _step_size, torch.bfloat16)
"""The function that ``torch.optim.Muon`` applies to a matrix."""
