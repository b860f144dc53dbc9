"""Computes the most memory that a training step gathers and reduces at a time."""

from __future__ import annotations

import math

from mmfsdp.basics.boxes import rows_per_rank
from mmfsdp.basics.dtypes import is_floating_point, itemsize
from mmfsdp.basics.torch_releases import frees_received_first
from mmfsdp.planning.plan_records import ParamEntry, ShardUnit
from mmfsdp.planning.schema import ShardPlan

__all__ = ["compute_itemsize", "gathered_bytes", "reducing_bytes", "whole_bytes"]


def gathered_bytes(plan: ShardPlan) -> int:
    """Return the most bytes of gathered parameters that a rank holds at any moment of a step: see `estimate_memory`."""
    # Models call their modules roughly in the order of their names, the root first.
    units = sorted(
        (unit for unit in plan.units if unit.params), key=lambda unit: (not unit.is_root, unit.params[0].place)
    )
    if plan.engine == "fsdp1" and plan.mesh.shard_ranks == 1:
        # Nothing is gathered; only a unit that computes in another dtype makes a copy.
        units = [unit for unit in units if compute_itemsize(unit, unit.params[0]) != itemsize(unit.params[0].dtype)]
    full = [sum(_whole(plan, param) * compute_itemsize(unit, param) for param in unit.params) for unit in units]
    kept = [_kept(unit, size) for unit, size in zip(units, full, strict=True)]
    ahead, peak, above = plan.forward_prefetch, sum(kept), list[int]()
    for i, size in enumerate(full):
        # Units around this one are in the middle of their own forward or backward.
        above = [j for j in above if _holds(units[j], units[i])]
        held = sum(kept[:i]) + sum(full[j] - kept[j] for j in above)
        if plan.engine == "fsdp1":
            forward = size + sum(full[i + 1 : i + 1 + max(ahead, 1)])
            backward = size + (full[i - 1] - kept[i - 1] if i and i - 1 not in above else 0)
        elif plan.mesh.shard_ranks == 1:
            forward = backward = size  # copied from the shard, which is whole
        else:
            # A unit's receive buffer is freed when the next unit is copied out of its own: before or after.
            receiving, computing = sum(full[max(i - 1, 0) : i + max(ahead, 1)]), size + sum(full[i : i + 1 + ahead])
            forward = max(receiving + (0 if frees_received_first() else size), computing)
            backward = 0 if kept[i] == size else kept[i] + 2 * size
        peak = max(peak, held + forward, held + backward)
        above.append(i)
    return peak


def _holds(unit: ShardUnit, other: ShardUnit) -> bool:
    return unit.is_root or any(part.startswith(f"{fqn}.") for fqn in unit.fqns for part in other.fqns)


def _kept(unit: ShardUnit, full: int) -> int:
    """Bytes of a unit's gathered parameters that stay between its forward and its backward."""
    reshard = unit.reshard_after_forward
    if unit.is_root or reshard is False:
        return full
    return 0 if reshard is True else full // reshard


def reducing_bytes(plan: ShardPlan) -> int:
    """Return the most bytes of whole gradients that a rank holds before they are reduced: see `estimate_memory`."""
    grads = {unit.fqns: 0 for unit in plan.units}
    copies = dict(grads)
    for unit in plan.units:
        for param in unit.params:
            if param.requires_grad:
                compute, reduced = compute_itemsize(unit, param), unit.precision.reduce_dtype
                grads[unit.fqns] += param.shard_numel(plan.mesh, 0, gathered=True) * compute
                copies[unit.fqns] += _whole(plan, param) * (itemsize(reduced) if reduced else compute)
    largest = max(copies[unit.fqns] + (0 if unit.is_root else grads[unit.fqns]) for unit in plan.units)
    return grads[plan.root.fqns] + largest


def _whole(plan: ShardPlan, param: ParamEntry) -> int:
    """Return the elements of a gathered parameter on the first rank, including padding."""
    if plan.engine == "fsdp1" or not param.shape or not param.shape[0]:
        return param.numel
    rows, *columns = param.box(plan.mesh, 0, gathered=True)[1]
    ranks = plan.mesh.sizes(param.divided)["shard"]
    return math.prod(columns) * rows_per_rank(rows, ranks) * ranks


def whole_bytes(unit: ShardUnit) -> int:
    """Return the bytes of a unit's whole parameters in the dtypes that they compute in."""
    return sum(param.numel * compute_itemsize(unit, param) for param in unit.params)


def compute_itemsize(unit: ShardUnit, param: ParamEntry) -> int:
    """Return the bytes of one element of a parameter in the dtype that its unit computes in."""
    wanted = unit.precision.param_dtype
    return itemsize(wanted if wanted is not None and is_floating_point(param.dtype) else param.dtype)
