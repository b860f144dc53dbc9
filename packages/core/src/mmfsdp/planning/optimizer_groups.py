"""The part of a plan that says which optimizer updates each parameter, and what its steps cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from mmfsdp.basics.tables import Column, format_table
from mmfsdp.basics.text import human_bytes
from mmfsdp.planning.matrix_steps import divide_into_buckets, muon_flops
from mmfsdp.planning.plan_records import MeshSpec, ParamEntry, Record

if TYPE_CHECKING:
    from mmfsdp.planning.schema import ShardPlan

__all__ = ["OptimizerGroup", "OptimizerPlan", "render_optimizer"]

_COLUMNS = (
    Column("optimizer"),
    Column("tensors", right=True),
    Column("params", right=True),
    Column("state/rank", right=True),
    Column("messages", right=True),
    Column("sent/rank", right=True),
    Column("FLOPs", right=True),
)
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
    """The most that matrices that travel together take, and about what a rank holds of messages."""

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
        """Return the parameters under Muon that travel together, each with the place of its group.

        Buckets are filled across groups, so two groups may share one. All are of one mesh, as those of a plan are.

        Args:
            params: The parameters of the plan by FQN.
            ranks: Ranks of its mesh.
        """
        under_muon = [
            (place, fqn) for place, group in enumerate(self.groups) if group.optimizer == "muon" for fqn in group.fqns
        ]
        sizes = [params[fqn].numel * WIRE_BYTES for _, fqn in under_muon]
        buckets = divide_into_buckets(sizes, self.bucket_bytes, ranks)
        return [[under_muon[place] for place in bucket] for bucket in buckets]


def render_optimizer(plan: ShardPlan, width: int | None) -> list[str]:
    """Return a table of the optimizers: parameters, state, messages and FLOPs of a step."""
    chosen = plan.optimizer
    if chosen is None:
        return []
    params = {param.fqn: param for param in plan.all_params()}
    whole = {param.fqn for param in plan.ignored_params}
    # The messages of a bucket are listed at the group that it begins with.
    begun = Counter(bucket[0][0] for bucket in chosen.buckets(params, plan.mesh.world_size))
    rows = [_cells(plan, chosen, group, params, whole, begun[place]) for place, group in enumerate(chosen.groups)]
    return ["", *format_table(list(_COLUMNS), rows, width)]


def _cells(
    plan: ShardPlan,
    chosen: OptimizerPlan,
    group: OptimizerGroup,
    params: Mapping[str, ParamEntry],
    whole: set[str],
    buckets: int,
) -> list[str]:
    own = [params[fqn] for fqn in group.fqns]
    held = sum(param.nbytes if param.fqn in whole else param.shard_nbytes(0, plan.mesh.shard) for param in own)
    numel = sum(param.numel for param in own)
    cells = [group.optimizer, str(len(own)), f"{numel:,}"]
    if group.optimizer == "adamw":
        return [*cells, human_bytes(2 * held), "-", "-", "-"]
    steps = group.settings["ns_steps"]
    flops = sum(muon_flops(rows, columns, steps) for rows, columns in chosen.matrices(group, params))
    messages = "0" if plan.mesh.world_size == 1 else str(2 * buckets) if buckets else "shared"
    return [*cells, human_bytes(held), messages, human_bytes(_sent(numel, plan.mesh)), f"{flops:.2e}"]


def _sent(numel: int, mesh: MeshSpec) -> int:
    """Return the bytes that a rank sends in a step: its shards to their owners, and updates back to all ranks.

    With n ranks that all shard, that is 2 P (n - 1) / n² bytes each way for P parameters. Each of several shard groups
    also receives the updates that the others have computed.
    """
    ranks = mesh.world_size
    there = numel * WIRE_BYTES * (mesh.shard - 1) / mesh.shard / ranks
    back = numel * WIRE_BYTES * (mesh.replicate - 1 / mesh.shard) / ranks
    return int(there + back)
