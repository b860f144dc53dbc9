"""The part of a plan that says which optimizer updates each parameter, and what its steps cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mmfsdp.basics.tables import Column, format_table
from mmfsdp.basics.text import human_bytes
from mmfsdp.planning.records import MeshSpec, ParamEntry, Record

if TYPE_CHECKING:
    from mmfsdp.planning.schema import ShardPlan

__all__ = ["OptimizerGroup", "OptimizerPlan", "muon_flops", "render_optimizer"]

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
    """The most that matrices that travel together take."""

    def matrices(self, group: OptimizerGroup, params: Mapping[str, ParamEntry]) -> list[tuple[int, int]]:
        """Return the rows and columns of each matrix of a group."""
        parts, is_stack = group.settings["parts"], group.settings["is_stack"]
        found = []
        for fqn in group.fqns:
            shape = params[fqn].shape
            count = parts * (shape[0] if is_stack else 1)
            found += [(shape[is_stack] // parts, math.prod(shape[is_stack + 1 :]))] * count
        return found


def muon_flops(matrices: Iterable[tuple[int, int]], steps: int) -> int:
    """Return the FLOPs of Muon's iterations: three products per iteration, in the smaller of both dimensions."""
    total = 0
    for rows, columns in matrices:
        short, long = sorted((rows, columns))
        total += 2 * steps * (2 * short**2 * long + short**3)
    return total


def render_optimizer(plan: ShardPlan, width: int | None) -> list[str]:
    """Return a table of the optimizers: parameters, state, messages and FLOPs of a step."""
    chosen = plan.optimizer
    if chosen is None:
        return []
    params = {param.fqn: param for param in plan.all_params()}
    whole = {param.fqn for param in plan.ignored_params}
    rows = [_cells(plan, chosen, group, params, whole) for group in chosen.groups]
    return ["", *format_table(list(_COLUMNS), rows, width)]


def _cells(
    plan: ShardPlan,
    chosen: OptimizerPlan,
    group: OptimizerGroup,
    params: Mapping[str, ParamEntry],
    whole: set[str],
) -> list[str]:
    own = [params[fqn] for fqn in group.fqns]
    held = sum(param.nbytes if param.fqn in whole else param.shard_nbytes(0, plan.mesh.shard) for param in own)
    numel = sum(param.numel for param in own)
    cells = [group.optimizer, str(len(own)), f"{numel:,}"]
    if group.optimizer == "adamw":
        return [*cells, human_bytes(2 * held), "-", "-", "-"]
    buckets = _buckets([param.numel * WIRE_BYTES for param in own], chosen.bucket_bytes)
    flops = muon_flops(chosen.matrices(group, params), group.settings["ns_steps"])
    messages = 0 if plan.mesh.world_size == 1 else 2 * buckets
    return [*cells, human_bytes(held), str(messages), human_bytes(_sent(numel, plan.mesh)), f"{flops:.2e}"]


def _buckets(sizes: Iterable[int], most: int) -> int:
    count = held = 0
    for size in sizes:
        if not count or held + size > most:
            count, held = count + 1, 0
        held += size
    return count


def _sent(numel: int, mesh: MeshSpec) -> int:
    """Return the bytes that a rank sends in a step: its shards to their owners, and updates back to all ranks.

    With n ranks that all shard, that is 2 P (n - 1) / n² bytes each way for P parameters. Each of several shard groups
    also receives the updates that the others have computed.
    """
    ranks = mesh.world_size
    there = numel * WIRE_BYTES * (mesh.shard - 1) / mesh.shard / ranks
    back = numel * WIRE_BYTES * (mesh.replicate - 1 / mesh.shard) / ranks
    return int(there + back)
