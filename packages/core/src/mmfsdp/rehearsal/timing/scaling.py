"""Derives the time of a step on other numbers of ranks from one rehearsal, without rehearsing each. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mmfsdp.planning.plan_records import MeshSpec
from mmfsdp.rehearsal.recording.step_records import Collective, Operator
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.links import Links
from mmfsdp.rehearsal.timing.step_time import StepTime, time_of

__all__ = ["RANKS", "scaled_times"]

RANKS = tuple(1 << power for power in range(13))
"""1 to 4,096."""


def scaled_times(
    mesh: MeshSpec,
    operators: Sequence[Operator],
    collectives: Sequence[Collective],
    device: Device,
    links: Links | None = None,
    ranks: Iterable[int] = RANKS,
) -> dict[int, StepTime]:
    """Return the time of the same step, with the same batch per rank, on other numbers of ranks. Pure.

    Groups of ranks grow: those that shard, or, if the mesh replicates, those that average over replicas. What is
    gathered and reduced stays the same; what the optimizer and clipping read and write shrinks with the shards. Padding
    and copies of shards are left as they are.

    Args:
        mesh: The mesh of the rehearsal.
        operators: Its operators.
        collectives: Its collectives.
        device: The device.
        links: The links between ranks; default: those that the device usually has.
        ranks: The numbers of ranks. Those that a replica of the mesh does not divide are left out.

    Returns:
        Times by number of ranks; none if the rehearsal had one rank, which sends nothing.
    """
    found: dict[int, StepTime] = {}
    if mesh.world_size == 1:
        return found
    fixed = mesh.shard if mesh.replicate > 1 else 1
    for count in ranks:
        if count % fixed:
            continue
        share = mesh.shard / count if mesh.replicate == 1 else 1.0
        found[count] = time_of(
            [_with_shards(item, share) for item in operators],
            [_with_ranks(item, mesh, count) for item in collectives],
            device,
            links,
        )
    return found


def _with_shards(item: Operator, share: float) -> Operator:
    if share == 1 or not item.nbytes or not item.is_of_shards:
        return item
    return replace(item, nbytes=max(round(item.nbytes * share), 1))


def _with_ranks(item: Collective, mesh: MeshSpec, count: int) -> Collective:
    if item.ranks == mesh.world_size:
        return replace(item, ranks=count)
    if item.ranks == mesh.replicate and item.stride == mesh.shard:
        return replace(item, ranks=count // mesh.shard)
    return item
