"""Memory that depends on an accelerator's kernels: their workspaces, and tensors that they keep for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["accelerator_kernels", "accelerator_scratch_bytes"]

_ROWS, _COLUMNS = 128, 32  # to which flash attention's backward rounds up the sequence and the size of a head


def accelerator_scratch_bytes(name: str, args: Any, result: Any) -> int:
    """Return the bytes that an operator needs on a GPU for a moment, beyond its results. Pure.

    The backward of fused attention in 16 bits adds up the gradient of the query in float32, and holds one number for
    each row; for grouped queries it also makes the gradients of keys and values per head of the query
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``). Workspaces of convolutions are not
    known: cuDNN chooses them on the device.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: What it returned.
    """
    if not name.startswith("aten::_scaled_dot_product_") or not name.endswith("_backward"):
        return 0
    query, key = args[1], args[2]
    batch, heads, rows, columns = query.shape
    rows, columns = -(-rows // _ROWS) * _ROWS, -(-columns // _COLUMNS) * _COLUMNS
    whole = 4 * batch * heads * rows * (1 + (columns if query.element_size() < 4 else 0))
    return int(whole + (2 * key.nbytes * heads // key.shape[1] if key.shape[1] != heads else 0))


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Make functions on CPU tensors keep for backward what they keep on an accelerator.

    Fused attention keeps no attention matrix, even with dropout or a learned mask, which the CPU's kernel lacks.
    Dropout keeps a mask of one byte per element, where the CPU keeps a factor in the dtype of the input. Names in
    ``torch.nn.functional`` are replaced, because autograd does not keep modes that replace functions when it
    recomputes activations. (Fake tensors that say they are on a GPU would choose by themselves, but without a GPU torch
    cannot run their backward: its engine asks the driver for the device.)
    """
    attention, dropout = F.scaled_dot_product_attention, F.dropout

    def fused_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
        if attn_mask is None or not learned or query.dim() != 4 or enable_gqa:
            return attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        found: torch.Tensor = operator(query, key, value, mask, True, 0.0, is_causal, scale=scale)[0]
        return found

    def masked_dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if inplace or not training or not p:
            return dropout(input, p, training, inplace)
        result: torch.Tensor = torch.native_dropout(input, p, True)[0]
        return result

    F.scaled_dot_product_attention, F.dropout = fused_attention, masked_dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = attention, dropout
