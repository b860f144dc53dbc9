"""What depends on the device's kernels: memory that they need for a moment, and other choices of an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["accelerator_kernels", "scratch_bytes"]

_DROPOUT = 4  # its place among the arguments of attention


def scratch_bytes(name: str, args: Any, result: Any) -> int:
    """Return the bytes that an operator needs on the CPU for a moment, beyond its results. Pure.

    Convolutions reorder tensors into blocks (oneDNN, as measured on torch 2.13): forward holds blocked copies of the
    input, the weight and the output, backward those of the gradient, the input and its gradient. 1 x 1 convolutions of
    small batches in float32 compute without them.

    Args:
        name: The operator's name in its schema.
        args: Its positional arguments.
        result: What it returned.
    """
    if name == "aten::convolution":
        inputs, weight, _, stride, *_ = args
        held = max(inputs.nbytes + weight.nbytes, result.nbytes)
    elif name == "aten::convolution_backward":
        grad, inputs, weight, _, stride, *_ = args
        held = max(2 * inputs.nbytes, inputs.nbytes + grad.nbytes + weight.nbytes)
    else:
        return 0
    is_point = all(side == 1 for side in weight.shape[2:]) and all(step == 1 for step in stride)
    return 0 if is_point and inputs.shape[0] < 16 and inputs.dtype == torch.float32 else int(held)


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Make functions on CPU tensors keep for backward what they keep on an accelerator.

    Fused attention keeps no attention matrix, even with dropout, which the CPU's kernel lacks. Dropout keeps a mask of
    one byte per element, where the CPU keeps a factor in the dtype of the input. Names in ``torch.nn.functional`` are
    replaced, because autograd does not keep modes that replace functions when it recomputes activations.
    """
    attention, dropout = F.scaled_dot_product_attention, F.dropout

    def fused_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) > _DROPOUT:
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return attention(*args, **kwargs)

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
