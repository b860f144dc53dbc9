"""What the last forward of a step finds, and what it keeps. Pure and torch-free."""

from __future__ import annotations

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.planning.step_memory import compute_itemsize
from mmfsdp.rehearsal.accounting import highest
from mmfsdp.rehearsal.fitting.extrapolating import ACTIVATIONS
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["carried_bytes", "kept_bytes", "reduced_bytes"]


def carried_bytes(step: Rehearsal, phase: int) -> int:
    """Return the bytes of gradients that are held from the beginning of a phase to its end.

    Args:
        step: The step.
        phase: The number of the phase, which is not the last one.
    """
    begin, end = _span(step, phase)
    held = (item for item in step.allocations if item.kind == "gradient" and item.begin < begin)
    return sum(item.nbytes for item in held if item.end is None or item.end >= end)


def kept_bytes(step: Rehearsal, phase: int) -> int:
    """Return the most bytes of activations that are held when every unit has begun its forward.

    A step that keeps what it gathers has all of it then.

    Args:
        step: The step.
        phase: The number of the forward among the step's phases.
    """
    begin, end = _span(step, phase)
    begun: dict[str, int] = {}
    for item in step.operators:
        if item.unit and item.role == "compute" and begin <= item.moment < end:  # the root is there before
            begun.setdefault(item.unit, item.moment)
    last = max(begun.values(), default=end - 1)
    live = (item for item in step.allocations if item.begin < end and (item.end is None or item.end > last))
    return highest(item for item in live if item.kind in ACTIVATIONS)[0]


def reduced_bytes(step: Rehearsal) -> int:
    """Return the bytes of the whole gradients that units reduce in the last backward, as micro-batches add them up.

    A micro-batch that does not reduce them leaves as much: `carried_bytes`. ``fully_shard`` adds them up in the dtype
    in which they are sent (``to_accumulated_grad_if_needed`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py),
    other engines in that of the parameters in forward.
    """
    begin = max((moment for name, moment in step.phases if name == "backward"), default=0)
    sent = {
        item.unit: item.nbytes for item in step.collectives if item.name == "reduce_scatter" and item.moment > begin
    }
    return sum(min(_gradient_bytes(unit, step), sent.get(unit.fqn, 0)) for unit in step.plan.units)


def _gradient_bytes(unit: ShardUnit, step: Rehearsal) -> int:
    reduced = unit.precision.reduce_dtype if step.engine == "fsdp2" else None
    trained = (param for param in unit.params if param.requires_grad)
    return sum(param.numel * (itemsize(reduced) if reduced else compute_itemsize(unit, param)) for param in trained)


def _span(step: Rehearsal, phase: int) -> tuple[int, int]:
    return step.phases[phase][1], step.phases[phase + 1][1]
