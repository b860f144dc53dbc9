"""Scratch memory that an accelerator's kernels take beside their results."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import torch

from mmfsdp.rehearsal.recording.kernels.losses import loss_bytes
from mmfsdp.rehearsal.recording.operator_costs import QUANTIZED_PRODUCT
from mmfsdp.rehearsal.recording.recurrent import RECURRENT, recurrent_scratch

__all__ = ["accelerator_scratch_bytes"]

_MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148, (10, 3): 148}
_USUAL = 132
_ROWS, _COLUMNS = 128, 32  # to which flash attention's backward rounds up the sequence and the size of a head

_SUMS = "aten::sum", "aten::mean"
_MOST_THREADS, _WARP = 512, 32
_THREADS_OF_ONE = 2048  # that a multiprocessor keeps
_FEWEST_ADDED, _MOST_ADDED = 16, 256  # numbers that a thread should add up
_MIB = 1 << 20
_BEHIND = 8 * _MIB  # what backward holds beside copies, at most
_FEWEST_CHANNELS = 128  # channels from which on sums of 3 x 3 elements in full float32 are products of spectra
_TILES = 16, 32  # sides of the tiles of a spectrum
_LARGEST = 14 * 14  # positions of an output whose weight has its gradient computed in the order of channels-last


def accelerator_scratch_bytes(capability: tuple[int, int] | None, name: str, args: Any, result: Any) -> int:
    """Return the scratch bytes that an operator needs on a GPU, beyond its results. Pure.

    The backward of fused attention in 16 bits adds up the gradient of the query in float32, and holds one number for
    each row; for grouped queries it also makes the gradients of keys and values per head of the query
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``). cuDNN rounds nothing up, as measured
    on an H100. The product with a weight of 4 bits unpacks it first (bitsandbytes/backends/cuda/ops.py; it does not for
    at most 256 rows).

    Args:
        capability: The device's compute capability; None if it is not known.
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: Its result.
    """
    if name == QUANTIZED_PRODUCT:
        return int(args[2][0] * args[2][1] * args[0].element_size())
    if name in RECURRENT:
        return recurrent_scratch(name, args)
    if not name.startswith("aten::_scaled_dot_product_") or not name.endswith("_backward"):
        multiprocessors = _USUAL if capability is None else _MULTIPROCESSORS.get(capability, _USUAL)
        found = _cudnn_convolution_bytes(name, args, result) or _reduction_bytes(name, args, multiprocessors)
        return found or loss_bytes(name, args, result)
    query, key = args[1], args[2]
    batch, heads, rows, columns = query.shape
    if "cudnn" not in name:
        rows, columns = -(-rows // _ROWS) * _ROWS, -(-columns // _COLUMNS) * _COLUMNS
    whole = 4 * batch * heads * rows * (1 + (columns if query.element_size() < 4 else 0))
    return int(whole + (2 * key.nbytes * heads // key.shape[1] if key.shape[1] != heads else 0))


def _reduction_bytes(name: str, args: Any, multiprocessors: int) -> int:
    """Return the bytes of partial sums of an operator that adds up a tensor's leading dimensions; 0 for others. Pure.

    Blocks of threads that share an output write what they have to memory. torch reserves it for all threads of all
    blocks, which for the gradient of a bias can be four times the gradient of the output: 103 MB for 12,608 rows of
    1,024 (``setReduceConfig`` and ``global_memory_size`` in aten/src/ATen/native/cuda/Reduce.cuh; as measured on an
    H100).

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
        multiprocessors: How many the device has.
    """
    if name not in _SUMS or len(args) < 2 or args[1] is None or not args[0].is_contiguous():
        return 0
    inputs, dims = args[0], sorted(dim % args[0].dim() for dim in args[1])
    if dims != list(range(len(dims))) or len(dims) in (0, inputs.dim()):
        return 0
    rows, outputs = prod(inputs.shape[: len(dims)]), prod(inputs.shape[len(dims) :])
    if not rows or not outputs:
        return 0
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)  # outputs that a thread has
    groups, threads = outputs // vector, _MOST_THREADS // vector
    across, along = _power(groups, threads), _power(rows, threads)
    width = min(across, _WARP)
    height = min(along, threads // width)
    width = min(across, threads // height)
    if rows < min(_FEWEST_ADDED * height, _MOST_ADDED):
        return 0
    each, blocks = ceil(rows / height), ceil(groups / width)
    room = multiprocessors * (_THREADS_OF_ONE // (width * height))
    if each < _MOST_ADDED or blocks > room:
        return 0
    shared = max(min(ceil(room / blocks), ceil(each / _FEWEST_ADDED)), ceil(each / _MOST_ADDED))
    return 4 * outputs * shared * width * vector if shared > 1 else 0


def _power(number: int, most: int) -> int:
    """Return the largest power of 2 that is at most a number, and at most another one."""
    return int(min(1 << (number.bit_length() - 1), most))


def _cudnn_convolution_bytes(name: str, args: Any, result: Any) -> int:
    """Return the scratch bytes that a convolution or its backward should need on a GPU; 0 for other operators.

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
        result: Its result.
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
    if taken < _FEWEST_CHANNELS or not side:
        return 0
    pairs = inputs.shape[0] * (taken + made) + 2 * taken * made
    return int(pairs * side * (side // 2 + 1) * torch.complex64.itemsize + weight.nbytes)


def _winograd_bytes(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the scratch bytes of a weight's gradient, which takes more than the input's."""
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
