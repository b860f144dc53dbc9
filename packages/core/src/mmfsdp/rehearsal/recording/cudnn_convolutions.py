"""Workspaces of cuDNN's convolutions, which it chooses on the device. Pure."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

__all__ = ["cudnn_convolution_bytes"]

_MIB = 1 << 20
_BEHIND = 8 * _MIB  # what backward holds beside copies, at most


def cudnn_convolution_bytes(name: str, args: Any, result: Any) -> int:
    """Return the bytes that a convolution, or its backward, is expected to need on a GPU for a moment; 0 for others.

    cuDNN computes in the order of channels-last. In the usual order forward holds such copies of the input, the weight
    and the output, and backward of the gradient, the input and the weight, in 16 bits with channels padded to eight. A
    kernel of one element that visits each, and one whose groups have one channel, needs none. This is what 72
    convolutions took on an H100 with torch 2.11 and cuDNN 9.19 (``benchmarks/on_gpu/kernels.jsonl``); patches of 4 x 4
    pixels in float32 took less.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: What it returned.
    """
    if name == "aten::convolution":
        inputs, weight, _, stride, _, _, _, _, groups = args
        moved, more = (inputs, weight, result), 0
    elif name == "aten::convolution_backward":
        grad, inputs, weight, _, stride, _, _, _, _, groups, _ = args
        moved, more = (grad, inputs, weight), _BEHIND
    else:
        return 0
    if groups > 1 or inputs.dim() != 4:
        return 0
    is_point = prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride)
    is_last = inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()
    return more if is_point or is_last else more + sum(map(_padded_bytes, moved))


def _padded_bytes(tensor: torch.Tensor) -> int:
    if tensor.element_size() > 2:
        return int(tensor.nbytes)
    channels = tensor.shape[1]
    return int(tensor.nbytes // channels * (-(-channels // 8) * 8)) if channels else 0
