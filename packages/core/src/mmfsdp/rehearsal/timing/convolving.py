"""How long convolutions and batch norms take on a GPU, as shares of its peaks. Pure.

Fitted to 72 convolutions on an H100 and 72 batch norms on an H200, alone (``benchmarks/on_gpu/kernels.jsonl``): half of
the convolutions are within a fifth, and most others within a half.
"""

from __future__ import annotations

from math import prod

from mmfsdp.rehearsal.recording.step_records import CHANNELS_LAST, Operator
from mmfsdp.rehearsal.timing.device_specs import Device

__all__ = ["convolution_seconds", "is_convolution", "norm_seconds"]

_CONVOLUTIONS = _FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"
_NORMS = _NORM, _NORM_BACKWARD = "aten::native_batch_norm", "aten::native_batch_norm_backward"

_DENSE, _DENSE_BACKWARD = 0.74, 0.5
"""How fast dense convolutions are beside products of matrices, forward and backward."""
_FULL = 0.95
"""Share of the peak in unrounded float32, instead of `Device.products`, before these factors."""
_FILLING = 60.0
"""Channels at which they reach half of that."""
_AGAIN = 1.7
"""How often backward moves its inputs and outputs: the gradients of input and weight are two kernels."""
_IMAGES = 0.028
"""Share of the peak in bfloat16, whatever the dtype, of a convolution with the colours of an image as channels."""
_COLOURS = 4
_SINGLE, _SINGLE_LAST, _SINGLE_LAST_FULL = (0.034, 0.02), (0.135, 0.07), (0.075, 0.058)
"""Share of the peak in float32 that forward and backward of a convolution reach whose groups have one channel: in the
usual order of channels, with channels last in 16 bits, and in float32."""
_WIDE, _SINGLE_WIDE = 9, 0.009
"""Elements of a kernel above which backward of the last of these reaches less."""
_NORMED, _NORMED_BACKWARD = 270.0, 350.0
"""Floating-point operations in float32 per element of a batch norm with many channels."""
_CHANNELS = 120.0
"""Channels at which a batch norm is half as fast: each is a block of threads."""


def is_convolution(operator: Operator) -> bool:
    """Return whether an operator is a convolution of images, or its backward."""
    return _plain(operator) in _CONVOLUTIONS and len(_weight(operator)) == 4


def convolution_seconds(operator: Operator, device: Device, index: int) -> tuple[float, float]:
    """Return the time in which a convolution computes, and in which it moves bytes, in seconds.

    Copies in another order of channels are operators of their own.

    Args:
        operator: One for which `is_convolution`.
        device: A device with fitted shares.
        index: Index into `mmfsdp.rehearsal.timing.ranges.CASES`.
    """
    made, taken, *kernel = _weight(operator)
    is_backward = _plain(operator) == _BACKWARD
    spread = device.products[index] / device.products.usual
    if taken <= _COLOURS and operator.shapes[1 if is_backward else 0][1] <= _COLOURS:
        rate = device.peak("bfloat16") * _IMAGES * spread
    elif taken == 1:
        rate = device.peak("float32") * _single_share(operator, prod(kernel), is_backward=is_backward) * spread
    else:
        shortest = min(made, taken)
        share = _FULL * spread if operator.dtype == "float32" else device.products[index]
        share *= shortest / (shortest + _FILLING) * (_DENSE_BACKWARD if is_backward else _DENSE)
        rate = device.peak(operator.dtype) * share
    moved = operator.nbytes * (_AGAIN if is_backward else 1.0)
    return operator.flops / rate, moved / (device.bandwidth * device.streaming[index])


def norm_seconds(operator: Operator, device: Device, index: int) -> float:
    """Return how long the units that compute take for a batch norm; 0 if the operator is another one."""
    if operator.name not in _NORMS or not operator.shapes or len(operator.shapes[0]) < 2:
        return 0.0
    channels, elements = operator.shapes[0][1], prod(operator.shapes[0])
    work = _NORMED_BACKWARD if operator.name == _NORM_BACKWARD else _NORMED
    spread = device.streaming[index] / device.streaming.usual
    return elements * work * (1 + _CHANNELS / max(channels, 1)) / (device.peak("float32") * spread)


def _single_share(operator: Operator, size: int, *, is_backward: bool) -> float:
    if not operator.name.endswith(CHANNELS_LAST):
        return _SINGLE[is_backward]
    if operator.dtype in ("float16", "bfloat16"):
        return _SINGLE_LAST[is_backward]
    return _SINGLE_WIDE if is_backward and size > _WIDE else _SINGLE_LAST_FULL[is_backward]


def _plain(operator: Operator) -> str:
    return operator.name.removesuffix(CHANNELS_LAST)


def _weight(operator: Operator) -> tuple[int, ...]:
    index = 2 if _plain(operator) == _BACKWARD else 1
    return operator.shapes[index] if len(operator.shapes) > index else ()
