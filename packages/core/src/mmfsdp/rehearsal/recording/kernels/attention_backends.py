"""Chooses the kernel of ``scaled_dot_product_attention`` as torch chooses it on a GPU, by shapes and dtypes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["attention_backend", "attention_order"]

_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""By torch's numbers (``torch.nn.attention.SDPBackend``)."""

_HALVES = (torch.float16, torch.bfloat16)
_WIDEST_FLASH, _WIDEST_CUDNN = 256, 128
_AMPERE = (8, 0)
_WITH_CUDNN_FIRST = (9, 10)  # major numbers of the compute capability, from torch 2.11 on
_CUDNN_FIRST_FROM = (2, 11)


def attention_order(capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Return the backends that may be used, the preferred one first.

    What ``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda.enable_*_sdp`` say counts. Otherwise torch prefers
    cuDNN on Hopper and on Blackwell of data centres from 2.11 on, whose wheels bring a cuDNN later than 9.15.0, and
    flash attention elsewhere (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, ``priority_order``).

    Args:
        capability: The compute capability of the device; None if it is not known, which counts as one without a
            preference for cuDNN.
    """
    enabled = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    }
    order = [_NAMES[number] for number in torch._C._get_sdp_priority_order() if number in _NAMES]
    is_default = order[:2] == ["flash", "efficient"]
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    prefers = capability is not None and capability[0] in _WITH_CUDNN_FIRST and release >= _CUDNN_FIRST_FROM
    if is_default and prefers:
        order = ["cudnn", *(name for name in order if name != "cudnn")]
    return tuple(name for name in order if enabled[name])


def attention_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    is_grouped: bool,
    order: Sequence[str],
    capability: tuple[int, int] | None = None,
) -> str:
    """Return the first backend of an order that takes these tensors; ``math`` if none does.

    Args:
        query: (batch, heads, rows, columns), as are the next two.
        key: See ``query``.
        value: See ``query``.
        mask: A mask or bias to add.
        is_causal: Whether later positions are masked.
        is_grouped: Whether keys may have fewer heads than the query.
        order: See `attention_order`.
        capability: The device's compute capability; None for one of Ampere or later.
    """
    parts = query, key, value
    if any(part.dim() != 4 or not part.numel() for part in parts):
        return "math"
    if len({(part.dtype, part.shape[0]) for part in parts}) > 1:
        return "math"
    is_ampere = capability is None or capability >= _AMPERE
    grouped = query.shape[1] != key.shape[1]
    takes_heads = not grouped or (is_grouped and query.shape[1] % key.shape[1] == 0)
    columns = {part.shape[3] for part in parts}
    is_half = query.dtype in _HALVES
    is_dense = mask is None or mask.stride(-1) == 1
    widest = max(columns)
    takes = {
        "flash": is_half
        and is_ampere
        and takes_heads
        and mask is None
        and len(columns) == 1
        and widest <= _WIDEST_FLASH
        and not (is_causal and query.shape[2] != key.shape[2]),
        "efficient": (is_half or query.dtype == torch.float32)
        and not grouped
        and is_dense
        and query.shape[3] == key.shape[3]
        and all(size % (8 if is_half else 4) == 0 for size in columns),
        "cudnn": is_half
        and is_ampere
        and takes_heads
        and is_dense
        and widest <= _WIDEST_CUDNN
        and all(size % 8 == 0 for size in columns)
        and not (mask is not None and mask.requires_grad),
        "math": True,
    }
    return next((name for name in order if takes[name]), "math")
