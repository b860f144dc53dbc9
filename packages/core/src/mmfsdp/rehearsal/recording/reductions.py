"""Memory that a GPU's sums over rows take for a moment, as those that make the gradients of biases."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

__all__ = ["reduction_bytes"]

_SUMS = "aten::sum", "aten::mean"
_MOST_THREADS, _WARP = 512, 32
_THREADS_OF_ONE = 2048  # that a multiprocessor keeps
_FEWEST, _MOST = 16, 256  # numbers that a thread should add up


def reduction_bytes(name: str, args: Any, multiprocessors: int) -> int:
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
    if rows < min(_FEWEST * height, _MOST):
        return 0
    each, blocks = ceil(rows / height), ceil(groups / width)
    room = multiprocessors * (_THREADS_OF_ONE // (width * height))
    if each < _MOST or blocks > room:
        return 0
    shared = max(min(ceil(room / blocks), ceil(each / _FEWEST)), ceil(each / _MOST))
    return 4 * outputs * shared * width * vector if shared > 1 else 0


def _power(number: int, most: int) -> int:
    """Return the largest power of 2 that is at most a number, and at most another one."""
    return int(min(1 << (number.bit_length() - 1), most))
