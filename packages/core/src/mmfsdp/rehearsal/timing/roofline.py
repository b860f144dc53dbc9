"""How long an operator takes on a device: the time to compute or the time to move bytes, whichever is longer."""

from __future__ import annotations

from mmfsdp.rehearsal.recording.step_records import COPIES, Operator
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.ranges import CASES

__all__ = ["kind_of", "operator_seconds", "weight_of"]

_VIEW = 1 / 3


def kind_of(operator: Operator) -> str:
    """Return ``attention``, ``product``, ``moving`` or ``view``: what bounds an operator."""
    if not operator.flops:
        return "moving" if operator.nbytes else "view"
    return "attention" if "attention" in operator.name else "product"


def weight_of(operator: Operator) -> float:
    """Return what an operator takes to issue, as a share of one that computes; a collective counts as one of these."""
    return _VIEW if "::" in operator.name and kind_of(operator) == "view" else 1.0


def operator_seconds(operator: Operator, device: Device, case: str) -> tuple[float, str]:
    """Return how long an operator takes, and ``compute`` or ``memory``, which bounds it. Pure.

    The roofline model (Williams, Waterman and Patterson, 2009): max(FLOPs / reached FLOP/s, bytes / reached bytes/s).
    What was measured on the device goes before.

    Args:
        operator: The operator.
        device: The device.
        case: One of `CASES`.
    """
    kind = kind_of(operator)
    if kind == "view":
        return 0.0, "memory"
    place = CASES.index(case)
    if operator.name in COPIES:
        return operator.nbytes / device.copies[place], "memory"
    known = device.measured.get(operator.signature) if device.measured else None
    if known is not None:
        return known * device.spread[place], "memory" if kind == "moving" else "compute"
    moving = operator.nbytes / (device.bandwidth * device.streaming[place])
    if kind == "moving":
        return max(moving, device.smallest), "memory"
    share = (device.attention if kind == "attention" else device.products)[place]
    computing = operator.flops / (device.peak(operator.dtype) * share)
    return max(computing, moving, device.smallest), "compute" if computing >= moving else "memory"
