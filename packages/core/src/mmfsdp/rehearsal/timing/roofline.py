"""How long an operator takes on a device: the time to compute or the time to move bytes, whichever is longer."""

from __future__ import annotations

from mmfsdp.rehearsal.recording.step_records import COPIES, REORDERED, Operator
from mmfsdp.rehearsal.timing.convolving import convolution_seconds, is_convolution, norm_seconds
from mmfsdp.rehearsal.timing.device_specs import Device
from mmfsdp.rehearsal.timing.ranges import CASES

__all__ = ["kind_of", "operator_seconds", "weight_of"]

_VIEW = 1 / 3
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_RECURRENT = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
_STEPS_AT_A_TIME = 0.45
"""Share of the peak that recurrent networks reach, whose products wait for each other, as one did on an H100."""
_HALVES = ("float16", "bfloat16")
_FULL = 0.745
"""Share of the peak that products of matrices and attention reach in float32 that is not rounded, on an H100: power
does not limit them, and what is sent beside them does not show."""
_SHORT_FULL = 300.0
"""Rows at which attention reaches half of that."""
_EFFICIENT = 0.5
"""How fast memory-efficient attention is in 16 bits beside flash attention."""
_LONG = 2048
"""Rows of attention from which on it reaches its share."""


def kind_of(operator: Operator) -> str:
    """Return ``attention``, ``product``, ``moving`` or ``view``: what bounds an operator."""
    if not operator.flops:
        return "moving" if operator.nbytes else "view"
    return "attention" if "attention" in operator.name else "product"


def weight_of(operator: Operator) -> float:
    """Return the cost of issuing an operator, relative to one that computes; a collective counts as such."""
    if operator.name == REORDERED:
        return 0.0
    return _VIEW if "::" in operator.name and kind_of(operator) == "view" else 1.0


def operator_seconds(operator: Operator, device: Device, case: str) -> tuple[float, str]:
    """Return how long an operator takes, and ``compute`` or ``memory``, which bounds it. Pure.

    The roofline model (Williams, Waterman and Patterson, 2009): max(FLOPs / reached FLOP/s, bytes / reached bytes/s).
    Times measured on the device take precedence.

    Args:
        operator: The operator.
        device: The device.
        case: One of `CASES`.
    """
    kind = kind_of(operator)
    if kind == "view":
        return 0.0, "memory"
    index = CASES.index(case)
    if operator.name in COPIES:
        return operator.nbytes / device.copies[index], "memory"
    known = device.measured.get(operator.signature) if device.measured else None
    if known is not None:
        return known * device.spread[index], "memory" if kind == "moving" else "compute"
    moving = operator.nbytes / (device.bandwidth * device.streaming[index])
    if kind == "moving":
        normalising = norm_seconds(operator, device, index) if device.filling else 0.0
        return max(moving, normalising, device.smallest), "memory"
    if device.filling and is_convolution(operator):
        computing, moving = convolution_seconds(operator, device, index)
        return max(computing, moving, device.smallest), "compute" if computing >= moving else "memory"
    is_full = bool(device.filling) and operator.dtype == "float32"
    full = _FULL * device.products[index] / device.products.usual
    if kind == "attention":
        share = _full_attention_share(operator, full) if is_full else _attention_share(operator, device, index)
    else:
        share = full if is_full else device.products[index]
    if operator.name in _RECURRENT:
        share = _STEPS_AT_A_TIME
    elif kind == "product" and device.filling:
        share *= _filled_share(operator, device)
    computing = operator.flops / (device.peak(operator.dtype) * share)
    return max(computing, moving, device.smallest), "compute" if computing >= moving else "memory"


def _attention_share(operator: Operator, device: Device, index: int) -> float:
    reached = device.attention_backward if operator.name.endswith("_backward") else None
    share = (reached or device.attention)[index]
    if "cudnn" in operator.name:
        share *= device.cudnn
    elif "efficient" in operator.name and operator.dtype in _HALVES:
        share *= _EFFICIENT
    rows = _rows(operator)
    filled = min(rows / (rows + device.short) * (_LONG + device.short) / _LONG, 1.0)
    return min(share * filled, 1.0)


def _full_attention_share(operator: Operator, full: float) -> float:
    rows = _rows(operator)
    return full * rows / (rows + _SHORT_FULL)


def _rows(operator: Operator) -> int:
    """Return the rows of attention; many if they are not known."""
    return operator.shapes[0][-2] if operator.shapes and len(operator.shapes[0]) == 4 else _LONG


def _filled_share(operator: Operator, device: Device) -> float:
    """Return the share of its time in which a product of two matrices multiplies; 1 if the operator is another one.

    Before a tile of the result is complete, and after, the units that multiply wait for memory: the shorter the sums
    and the fewer the tiles, the larger that share. It takes as long for units that multiply more slowly, so these need
    shorter sides.
    """
    matrices = [shape for shape in operator.shapes if len(shape) in (2, 3)][-2:]
    if operator.name not in _PRODUCTS or len(matrices) < 2:
        return 1.0
    shortest = min(*matrices[0][-2:], matrices[1][-1])
    filling = device.filling * device.peak(operator.dtype) / device.peak("bfloat16")
    return shortest / (shortest + filling) if shortest else 1.0
