"""Estimates the time of a step on a mesh of another shape from one that was rehearsed. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmfsdp.planning.plan_records import MeshSpec
from mmfsdp.planning.schema import ShardPlan
from mmfsdp.rehearsal.recording.step_records import Collective, Operator
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.step_time import usual_seconds

__all__ = ["can_reshard", "resharded_seconds"]


def can_reshard(known: ShardPlan, wanted: ShardPlan) -> bool:
    """Return whether the time with one plan follows from a step with another.

    What a unit gathers again in backward can be left out, but not made up.
    """
    if {known.engine, wanted.engine} != {"fsdp2"} or known.mesh.shard == 1 or wanted.mesh.shard == 1:
        return False
    return _gathers_again(known) or not _gathers_again(wanted)


def resharded_seconds(step: Rehearsal, wanted: ShardPlan, device: Device) -> float:
    """Return the seconds of a step in which the ranks are arranged as another plan says.

    Messages go to other ranks, gradients are averaged over replicas if there are any, and shards have another size
    where they are copied to be gathered, in clipping and in the optimizer; all else stays.

    Args:
        step: A step of a plan from which that of ``wanted`` follows; see `can_reshard`.
        wanted: The plan, for the same model or one with more layers.
        device: The device.
    """
    pairs = [*_rewritten(step, wanted)]
    sent = [message for _, message in pairs if message is not None]
    return usual_seconds([operator for operator, _ in pairs], sent, device)


def _rewritten(step: Rehearsal, wanted: ShardPlan) -> Iterator[tuple[Operator, Collective | None]]:
    """Yield operators, each with its collective if it is one."""
    sent = iter(step.collectives)
    shard, replicate = wanted.mesh.shard, wanted.mesh.replicate
    ratio = step.plan.mesh.shard / shard
    drops = _gathers_again(step.plan) and not _gathers_again(wanted)
    for item in step.operators:
        message = next(sent) if "::" not in item.name else None
        if drops and item.role == "gather" and item.phase == "backward":
            continue
        if message is None:
            yield replace(item, nbytes=round(item.nbytes * ratio)) if item.is_of_shards else item, None
        elif message.unit is None:
            yield from ((item, changed) for changed in _outside_of_units(item, message, step.plan.mesh, wanted.mesh))
        elif message.name in ("all_gather", "reduce_scatter"):
            yield item, replace(message, ranks=shard, stride=1)
            if message.name == "reduce_scatter" and replicate > 1:
                average = replace(message, name="all_reduce", nbytes=message.nbytes // shard, ranks=replicate)
                yield replace(item, name="all_reduce"), replace(average, stride=shard)


def _outside_of_units(item: Operator, message: Collective, known: MeshSpec, wanted: MeshSpec) -> Iterator[Collective]:
    """Yield what is sent in place of a message that belongs to no unit.

    Clipping adds up the norms of shards. When backward ends, ranks tell each other along every dimension of the mesh
    which gradients they have. What modules send goes where it went.
    """
    over_shards = replace(message, ranks=wanted.shard, stride=1)
    if item.phase == "clipping":
        yield over_shards
    elif item.phase != "backward" or item.module:
        yield message
    elif (message.ranks, message.stride) == (known.shard, 1):
        if wanted.replicate > 1:
            yield replace(message, ranks=wanted.replicate, stride=wanted.shard)
        yield over_shards


def _gathers_again(plan: ShardPlan) -> bool:
    return any(unit.reshard_after_forward is not False for unit in plan.units if not unit.is_root)
