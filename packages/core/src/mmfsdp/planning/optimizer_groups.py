"""The part of a plan that says which optimizer updates each parameter, and what its steps cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from mmfsdp.planning.matrix_steps import divide_into_buckets
from mmfsdp.planning.plan_records import ParamEntry, Record

__all__ = ["WIRE_BYTES", "OptimizerGroup", "OptimizerPlan"]

WIRE_BYTES = 2
"""Bytes of an element that Muon sends, in bfloat16."""


class OptimizerGroup(Record):
    """Parameters that one optimizer updates with the same settings."""

    optimizer: Literal["muon", "adamw"]
    fqns: tuple[str, ...]
    settings: dict[str, Any]
    """Its settings by torch's names. For Muon also ``parts`` and ``is_stack``: the matrices in each parameter."""


class OptimizerPlan(Record):
    """Which optimizer updates each parameter; `build_optimizer` builds it."""

    groups: tuple[OptimizerGroup, ...]
    bucket_bytes: int
    """Maximum bytes of matrices that travel together, and roughly the bytes of messages that a rank holds."""

    def matrices(self, group: OptimizerGroup, params: Mapping[str, ParamEntry]) -> list[tuple[int, int]]:
        """Return the rows and columns of each matrix of a group."""
        parts, is_stack = group.settings["parts"], group.settings["is_stack"]
        found = []
        for fqn in group.fqns:
            shape = params[fqn].shape
            count = parts * (shape[0] if is_stack else 1)
            found += [(shape[is_stack] // parts, math.prod(shape[is_stack + 1 :]))] * count
        return found

    def buckets(self, params: Mapping[str, ParamEntry], ranks: int) -> list[list[tuple[int, str]]]:
        """Return the parameters under Muon that travel together, each with the index of its group.

        Buckets are filled across groups, so two groups may share one. All share the one mesh of the plan.

        Args:
            params: The parameters of the plan by FQN.
            ranks: Ranks of its mesh.
        """
        under_muon = [
            (index, fqn) for index, group in enumerate(self.groups) if group.optimizer == "muon" for fqn in group.fqns
        ]
        sizes = [params[fqn].numel * WIRE_BYTES for _, fqn in under_muon]
        buckets = divide_into_buckets(sizes, self.bucket_bytes, ranks)
        return [[under_muon[index] for index in bucket] for bucket in buckets]
