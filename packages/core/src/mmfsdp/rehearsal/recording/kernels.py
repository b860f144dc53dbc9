"""Memory that an accelerator's kernels take for a moment beside their results."""

from __future__ import annotations

from typing import Any

from mmfsdp.rehearsal.recording.cudnn_convolutions import cudnn_convolution_bytes
from mmfsdp.rehearsal.recording.losses import loss_bytes
from mmfsdp.rehearsal.recording.operator_costs import QUANTIZED_PRODUCT
from mmfsdp.rehearsal.recording.recurrent import RECURRENT, recurrent_scratch
from mmfsdp.rehearsal.recording.reductions import reduction_bytes

__all__ = ["accelerator_scratch_bytes"]

_MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148, (10, 3): 148}
_USUAL = 132
_ROWS, _COLUMNS = 128, 32  # to which flash attention's backward rounds up the sequence and the size of a head


def accelerator_scratch_bytes(capability: tuple[int, int] | None, name: str, args: Any, result: Any) -> int:
    """Return the bytes that an operator needs on a GPU for a moment, beyond its results. Pure.

    The backward of fused attention in 16 bits adds up the gradient of the query in float32, and holds one number for
    each row; for grouped queries it also makes the gradients of keys and values per head of the query
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``). cuDNN rounds nothing up, as measured
    on an H100. The product with a weight of 4 bits unpacks it first (bitsandbytes/backends/cuda/ops.py; it does not for
    at most 256 rows).

    Args:
        capability: The device's compute capability; None if it is not known.
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: What it returned.
    """
    if name == QUANTIZED_PRODUCT:
        return int(args[2][0] * args[2][1] * args[0].element_size())
    if name in RECURRENT:
        return recurrent_scratch(name, args)
    if not name.startswith("aten::_scaled_dot_product_") or not name.endswith("_backward"):
        multiprocessors = _USUAL if capability is None else _MULTIPROCESSORS.get(capability, _USUAL)
        found = cudnn_convolution_bytes(name, args, result) or reduction_bytes(name, args, multiprocessors)
        return found or loss_bytes(name, args, result)
    query, key = args[1], args[2]
    batch, heads, rows, columns = query.shape
    if "cudnn" not in name:
        rows, columns = -(-rows // _ROWS) * _ROWS, -(-columns // _COLUMNS) * _COLUMNS
    whole = 4 * batch * heads * rows * (1 + (columns if query.element_size() < 4 else 0))
    return int(whole + (2 * key.nbytes * heads // key.shape[1] if key.shape[1] != heads else 0))
