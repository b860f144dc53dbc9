"""What FSDP1 allocates while it wraps a model, and frees again: segments that training finds. Pure and torch-free."""

from __future__ import annotations

from typing import NamedTuple

from mmfsdp.planning.schema import ShardPlan

__all__ = ["Wrapped", "wrapped_units"]


class Wrapped(NamedTuple):
    """The allocations of one unit (``FlatParamHandle`` in torch/distributed/fsdp/_flat_param.py), in order.

    Parameters come to the device one by one, are copied into a flat one, and freed; it is cut, and freed, too.
    """

    params: tuple[int, ...]
    """Bytes of each parameter."""
    flat: int
    """Bytes of the flat parameter."""
    shard: int
    """Bytes of the piece that the rank keeps; as many as `flat` if the unit is not sharded, which then stays."""


def wrapped_units(plan: ShardPlan, rank: int = 0) -> tuple[Wrapped, ...]:
    """Return what wrapping allocates, unit by unit; nothing for other engines, or if shards are in CPU memory.

    Args:
        plan: The plan.
        rank: The rank.
    """
    if plan.engine != "fsdp1" or plan.cpu_offload:
        return ()
    found = []
    for unit in plan.units:
        shard = plan.unit_param_bytes(unit, rank)
        found.append(Wrapped(tuple(param.nbytes for param in unit.params), shard * plan.mesh.shard, shard))
    return tuple(found)
