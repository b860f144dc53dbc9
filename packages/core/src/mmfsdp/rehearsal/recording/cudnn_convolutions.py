"""Workspaces of cuDNN's convolutions, which it chooses on the device."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

__all__ = ["cudnn_convolution_bytes"]

_MIB = 1 << 20
_BEHIND = 8 * _MIB  # what backward holds beside copies, at most
_FEWEST = 128  # channels from which on sums of 3 x 3 elements in full float32 are products of spectra
_TILES = 16, 32  # sides of the tiles of a spectrum
_LARGEST = 14 * 14  # positions of an output whose weight has its gradient computed in the order of channels-last


def cudnn_convolution_bytes(name: str, args: Any, result: Any) -> int:
    """Return the bytes that a convolution, or its backward, is expected to need on a GPU for a moment; 0 for others.

    cuDNN computes in the order of channels-last. In the usual order forward holds such copies of the input, the weight
    and the output, and backward of the gradient, the input and the weight, in 16 bits with channels padded to eight. A
    kernel of one element that visits each, and one whose groups have one channel, needs none. This is what 72
    convolutions took on an H100 with torch 2.11 and cuDNN 9.19 (``benchmarks/on_gpu/kernels.jsonl``); patches of 4 x 4
    pixels in float32 took less.

    In float32 without TensorFloat32 (``torch.backends.cudnn.allow_tf32``) it computes kernels of 3 x 3 elements another
    way, as all of a ResNet-50 did there: forward multiplies spectra of inputs, weights and outputs, and backward has
    the input and the gradient in Winograd's form, 36 numbers for each 4 x 4 positions.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: What it returned.
    """
    if name == "aten::convolution":
        inputs, weight, _, stride, _, dilation, _, _, groups = args
        moved, more = (inputs, weight, result), 0
    elif name == "aten::convolution_backward":
        grad, inputs, weight, _, stride, _, dilation, _, _, groups, _ = args
        moved, more = (grad, inputs, weight), _BEHIND
    else:
        return 0
    if groups > 1 or inputs.dim() != 4:
        return 0
    if inputs.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32:
        is_small = tuple(weight.shape[2:]) == (3, 3) and all(step == 1 for step in (*stride, *dilation))
        if name == "aten::convolution":
            return _spectrum_bytes(inputs, weight) if is_small else 0
        return (_winograd_bytes if is_small else _turned_bytes)(args[0], inputs, weight)
    is_point = prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride)
    is_last = inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()
    return more if is_point or is_last else more + sum(map(_padded_bytes, moved))


def _spectrum_bytes(inputs: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the bytes of spectra and of a copy of the weight, where one tile covers an image; else 0."""
    made, taken = weight.shape[:2]
    side = next((tile for tile in _TILES if max(inputs.shape[2:]) + 2 <= tile), 0)
    if taken < _FEWEST or not side:
        return 0
    pairs = inputs.shape[0] * (taken + made) + 2 * taken * made
    return int(pairs * side * (side // 2 + 1) * torch.complex64.itemsize + weight.nbytes)


def _winograd_bytes(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> int:
    """Return what the gradient of a weight takes, which is more than that of the input does."""
    made, taken = weight.shape[:2]
    tiles = inputs.shape[0] * prod(-(-length // 4) for length in grad.shape[2:])
    return int(36 * (tiles * (made + taken) + made * taken) * weight.element_size())


def _turned_bytes(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the bytes of copies in the order of channels-last, which small images have."""
    if prod(grad.shape[2:]) > _LARGEST:
        return 0
    return int(grad.nbytes + inputs.nbytes + (weight.nbytes if prod(weight.shape[2:]) > 1 else 0))


def _padded_bytes(tensor: torch.Tensor) -> int:
    if tensor.element_size() > 2:
        return int(tensor.nbytes)
    channels = tensor.shape[1]
    return int(tensor.nbytes // channels * (-(-channels // 8) * 8)) if channels else 0
