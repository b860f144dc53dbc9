"""Scratch memory that the CPU's kernels take beside their results. Pure."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from mmfsdp.rehearsal.fakes.fake import tensors_in
from mmfsdp.rehearsal.recording.kernels.convolutions import convolution_bytes
from mmfsdp.rehearsal.recording.kernels.losses import loss_bytes
from mmfsdp.rehearsal.recording.kernels.onednn_recurrent import lstm_bytes

__all__ = ["cpu_scratch_bytes"]

_PROMOTED = frozenset(
    f"aten::{name}{end}"
    for name in (
        "add", "atan2", "div", "eq", "fmod", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "ne", "pow",
        "remainder", "sub",
    )
    for end in ("", "_")
)  # fmt: skip
"""Operators of two tensors that compute in the dtype that both can be converted to."""

_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Products of matrices, and which argument is the first factor."""
_ROWS, _COLUMNS, _DEPTH = 256, 64, 512  # of the blocks in which oneDNN multiplies

_NORM_BACKWARD = "aten::native_batch_norm_backward"  # makes another gradient of the input first
_UPSAMPLES = "aten::upsample_bilinear2d", "aten::upsample_nearest2d"
_FARTHEST = 256  # by how many rows and columns a map may grow to be computed in the order of channels-last
_TO_REAL, _TRANSFORMS = "aten::_fft_c2r", ("aten::_fft_c2c", "aten::_fft_r2c")


def cpu_scratch_bytes(name: str, args: Any, result: Any) -> int:
    """Return the scratch bytes that an operator needs on the CPU, beyond its results.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: Its result.
    """
    if name in _PROMOTED:
        return _converted_bytes(args)
    if name in _PRODUCTS:
        return _product_bytes(args[_PRODUCTS[name]])
    if name == _NORM_BACKWARD:
        return int(args[1].nbytes)
    if name in _UPSAMPLES:
        return _upsample_bytes(args[0], result)
    if name == _TO_REAL or name in _TRANSFORMS:
        return _transform_bytes(name, *args[:2])
    return convolution_bytes(name, args, result) or lstm_bytes(name, args) or loss_bytes(name, args, result)


def _converted_bytes(args: Any) -> int:
    """Return the bytes of operands that are converted before a pointwise operator, such as a mask in a product.

    A CPU kernel takes one dtype, whereas CUDA kernels convert what they read
    (aten/src/ATen/TensorIterator.cpp, ``compute_types``).
    """
    whole = [tensor for tensor in tensors_in(args[:2]) if tensor.dim()]
    if len(whole) < 2 or whole[0].dtype == whole[1].dtype:
        return 0
    common = reduce(torch.promote_types, (tensor.dtype for tensor in whole))
    return sum(tensor.numel() * common.itemsize for tensor in whole if tensor.dtype != common)


def _product_bytes(one: torch.Tensor) -> int:
    """Return the bytes of the blocks in which a thread multiplies in 16 bits: sums in float32, and copied factors.

    As measured with torch 2.13 and oneDNN 3.12 on AVX-512 and one thread, as torchrun starts a rank. A
    transposed first factor is also copied.
    """
    if one.element_size() != 2:
        return 0
    rows, depth = min(one.shape[-2], _ROWS), min(one.shape[-1], _DEPTH)
    turned = one.stride(-1) != 1
    return rows * _COLUMNS * 4 + depth * _COLUMNS * 2 + (rows * depth * 2 if turned else 0)


def _upsample_bytes(inputs: torch.Tensor, result: torch.Tensor) -> int:
    """Return the bytes of copies in the order of channels-last (aten/src/ATen/native/cpu/UpSampleKernel.cpp)."""
    is_far = sum(result.shape[2:]) > sum(inputs.shape[2:]) + _FARTHEST
    return 0 if is_far or not inputs.is_contiguous() else inputs.nbytes + result.nbytes


def _transform_bytes(name: str, inputs: torch.Tensor, dims: Any) -> int:
    """Return the bytes of the copies that a Fourier transform makes, as MKL does (aten/src/ATen/native/mkl).

    Inputs are copied unless the last dimensions are transformed, in order. One to real numbers first transforms all
    dimensions but the last one.
    """
    if name == _TO_REAL and len(dims) > 1:
        return 2 * inputs.nbytes
    is_last = sorted(dim % inputs.dim() for dim in dims) == list(range(inputs.dim() - len(dims), inputs.dim()))
    return 0 if is_last and inputs.is_contiguous() else inputs.nbytes
