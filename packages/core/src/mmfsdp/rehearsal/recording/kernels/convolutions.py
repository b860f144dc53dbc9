"""Memory of convolutions on the CPU beyond their results: oneDNN's blocked copies and sums. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

__all__ = ["convolution_bytes"]

_BLOCK = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8  # channels that a vector of float32 holds
_WIDEST_DEPTHWISE = 3  # columns of the kernels that oneDNN's depthwise backward takes in place of the direct one
_WIDEST = 14  # columns of the kernels that its direct backward takes; wider ones are products of matrices
_WIDEST_OF_IMAGE = 24  # the same in 16 bits for images
_NARROW = 32  # bytes of the channels of a group that are enough for blocks
_IMAGE = 4  # channels of an image, which is read as it is


def convolution_bytes(name: str, args: Any, result: Any) -> int:
    """Return the scratch bytes that a convolution or its backward needs on the CPU; 0 for other operators.

    As measured on torch 2.13 with oneDNN 3.12 and one thread. With AMX, which ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16``
    turns off, oneDNN holds more in 16 bits: up to 0.4 MB for buffers, and another output of a 1 x 1 kernel.

    oneDNN reorders tensors into blocks of 16 channels (8 without AVX-512), and pads the channels to whole blocks.
    Forward holds such copies of the input, the weight and the output; backward, of the gradient and the input.
    Channels-last tensors need no copies, nor does a 1 x 1 convolution of a small batch in float32. Inputs in an order
    that the kernel does not read, such as transposed ones of one dimension, are copied first.

    Backward makes the gradient of the weight in blocks of the channels of a group: a depthwise one in channels-last
    order, whose groups have one channel, is 256 times as large as the weight, unless its kernel is at most three
    columns wide and not dilated. In 16 bits it is added up in float32, and a sample of the input and of the gradient is
    transposed, groups padded, too. For kernels wider than 14 columns, and for those in float32 that are deeper than
    their input, a matrix has what the kernel covers at each position of a sample. A transposed convolution copies its
    result twice, if it is strided, and the gradient of its weight. (In oneDNN's src/cpu/x64:
    jit_uni_dw_conv_kernel_utils.cpp, jit_avx512_common_conv_kernel.cpp, jit_avx512_core_bf16_conv_kernel.cpp.)

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: Its result.
    """
    if name == "aten::convolution":
        inputs, weight, _, stride, _, _, is_transposed, _, groups = args
        copied: tuple[torch.Tensor, ...] = (inputs,)
        held = _forward_bytes(inputs, weight, result, groups)
        if is_transposed and any(step != 1 for step in stride):
            held = max(held, 2 * result.nbytes)
    elif name == "aten::convolution_backward":
        grad, inputs, weight, _, stride, padding, dilation, is_transposed, _, groups, wanted = args
        copied = (grad, inputs)
        held = _backward_bytes(grad, inputs, weight, stride, padding, dilation, groups, is_first=not wanted[0])
        if is_transposed:
            held = max(held, 2 * weight.nbytes)
    else:
        return 0
    if _is_point(weight, stride) and inputs.shape[0] < 16 and inputs.dtype == torch.float32:
        return 0
    return int(held + sum(part.nbytes for part in copied if not _is_dense(part)))


def _forward_bytes(inputs: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int) -> int:
    if _is_channels_last(inputs):
        return weight.nbytes if weight.shape[1] == 1 < groups else 2 * weight.nbytes
    after = _blocked(result)
    if _is_image(inputs):  # in 16 bits the weight has four channels, too
        copy = weight.nbytes // weight.shape[1] * _IMAGE if weight.element_size() == 2 else weight.nbytes
        return max(copy + after - result.nbytes, after)
    copy = weight.nbytes if _is_narrow(weight, groups) else _blocked_weight(weight, groups)
    return max(_blocked(inputs) + copy + after - result.nbytes, after)


def _backward_bytes(
    grad: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    is_first: bool,
) -> int:
    """Return the bytes that backward holds; the first convolution's makes no gradient of its input."""
    last, columns = _is_channels_last(inputs), weight.shape[-1]
    is_narrow, is_strided = _is_narrow(weight, groups), any(step != 1 for step in stride)
    is_rounded, is_image = weight.element_size() == 2, _is_image(inputs)
    is_depthwise = _takes_depthwise(inputs, weight, stride, padding, dilation, groups)
    if last and is_depthwise:
        return 2 * weight.nbytes
    made = weight.nbytes if is_image else _blocked_weight(weight, groups)
    summed = 0
    is_wide = columns > (_WIDEST_OF_IMAGE if is_rounded and is_image else _WIDEST)
    is_deep = weight.dim() == 5 and not is_rounded and inputs.shape[2] < weight.shape[2]
    if (is_wide or is_deep) and not is_narrow:
        covered = inputs[0].nbytes // prod(inputs.shape[2:]) * prod(weight.shape[2:]) * prod(grad.shape[2:])
        products = covered + 4 * weight.numel() * torch.float32.itemsize
        return products + weight.nbytes if last else max(products, _blocked(grad))
    if is_rounded and not is_depthwise and (columns <= _WIDEST or is_image):
        moves = last or not _is_point(weight, stride)
        summed = 2 * made + moves * _transposed(grad, inputs, stride, padding, groups, is_image=is_image)
    if last and columns <= _WIDEST:
        return made + max(summed, 2 * weight.nbytes)
    before, after = 0 if is_image and is_first else _blocked(inputs), _blocked(grad)
    if is_narrow and not is_depthwise and not last:
        held = max(after + before - inputs.nbytes, before)
    else:
        held = max(before + after + summed, 0 if is_narrow else made)
    is_copied = is_strided and not is_first and not (is_narrow and not is_rounded)
    # The gradient of the weight is not there yet.
    return max(held, 2 * inputs.nbytes - weight.nbytes if is_copied else 0)


def _takes_depthwise(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> bool:
    """Return whether oneDNN's depthwise backward takes a convolution: a small kernel that the input holds."""
    if not weight.shape[1] == 1 < groups or any(step != 1 for step in dilation):
        return False
    if weight.shape[-1] > _WIDEST_DEPTHWISE or stride[-1] > weight.shape[-1]:
        return False
    return weight.dim() < 4 or inputs.shape[-2] >= weight.shape[-2] + -padding[-2] % stride[-2]


def _transposed(
    grad: torch.Tensor,
    inputs: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    *,
    is_image: bool,
) -> int:
    """Return the bytes of a sample of the input, but of no image, and of the gradient, transposed, rows padded."""
    around = _up(padding[-1] + 1, 2)
    columns = _up(-(-inputs.shape[-1] // stride[-1]) + around, 2) * stride[-1]
    found = 0
    for part, wide in ((inputs, columns), (grad, _up(grad.shape[-1], 2)))[is_image:]:
        found += groups * _up(part.shape[1] // groups, _BLOCK) * prod(part.shape[2:-1]) * wide * part.element_size()
    return found


def _blocked_weight(weight: torch.Tensor, groups: int) -> int:
    """Return the bytes of a weight, or its gradient, in blocks of the channels of a group."""
    made, taken = _up(weight.shape[0] // groups, _BLOCK), _up(weight.shape[1], _BLOCK)
    return groups * made * taken * prod(weight.shape[2:]) * weight.element_size()


def _blocked(tensor: torch.Tensor) -> int:
    """Return the bytes of activations in blocks of channels."""
    return tensor.nbytes if _is_image(tensor) else tensor.nbytes // tensor.shape[1] * _up(tensor.shape[1], _BLOCK)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.shape[1] <= _IMAGE


def _is_narrow(weight: torch.Tensor, groups: int) -> bool:
    """Return whether the channels of a group are too few for blocks: weight and activations are read as they are."""
    return groups > 1 and weight.shape[1] * weight.element_size() < _NARROW


def _is_point(weight: torch.Tensor, stride: Sequence[int]) -> bool:
    return all(side == 1 for side in weight.shape[2:]) and all(step == 1 for step in stride)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a batch of images, which is not contiguous, has the channels of a pixel side by side.

    It may be a part of the channels of a larger one.
    """
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    _, channels, rows, columns = tensor.shape
    image, channel, row, column = tensor.stride()
    return channel == 1 and column >= channels and row >= column * columns and image >= row * rows


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
