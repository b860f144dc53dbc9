"""Memory that FSDP1 allocates and frees while it wraps a model; training finds the segments. Pure and torch-free."""

from __future__ import annotations

from typing import NamedTuple

from mmfsdp.planning.schema import ShardPlan

__all__ = ["Wrapped", "wrapped_units"]

_BUCKET = 250 << 20  # PARAM_BROADCAST_BUCKET_SIZE in torch/distributed/fsdp/_init_utils.py


class Wrapped(NamedTuple):
    """The allocations of one unit (``FlatParamHandle`` in torch/distributed/fsdp/_flat_param.py), in order.

    Parameters come to the device one by one, are copied into a flat one, and freed; it is cut, and freed, too. With
    ``sync_module_states`` they are sent before, in buckets.
    """

    params: tuple[int, ...]
    """Bytes of each parameter."""
    flat: int
    """Bytes of the flat parameter."""
    shard: int
    """Bytes of the piece that the rank keeps; equal to `flat` if the unit is not sharded, and `flat` then stays."""
    sent: tuple[int, ...] = ()
    """Bytes of each bucket; two of them are allocated at a time."""


def wrapped_units(plan: ShardPlan, rank: int = 0, *, synced: bool = False) -> tuple[Wrapped, ...]:
    """Return what wrapping allocates, unit by unit; nothing for other engines, or if shards are in CPU memory.

    Args:
        plan: The plan.
        rank: The rank.
        synced: Whether rank 0 sends its parameters, as with ``sync_module_states``.
    """
    if plan.engine != "fsdp1" or plan.cpu_offload:
        return ()
    found = [Wrapped((), param.nbytes, param.nbytes) for param in plan.ignored_params]  # which stay as they are
    for unit in plan.units:
        shard, params = plan.unit_param_bytes(unit, rank), tuple(param.nbytes for param in unit.params)
        found.append(Wrapped(params, shard * plan.mesh.shard, shard, _buckets(params) if synced else ()))
    return tuple(found)


def _buckets(params: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of buckets, each full at the limit or above (torch/csrc/distributed/c10d/reducer.cpp)."""
    found, size = [], 0
    for nbytes in params:
        size += nbytes
        if size >= _BUCKET:
            found.append(size)
            size = 0
    return (*found, size) if size else tuple(found)
