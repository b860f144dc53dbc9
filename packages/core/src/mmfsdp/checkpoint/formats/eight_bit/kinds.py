"""The kinds of 8-bit floats that weights are written as, by the names that the setting ``quantize`` has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.eight_bit import quantizing, scaled_floats

__all__ = ["quantization_config", "quantized"]

_IN_BLOCKS = "fp8"


def quantized(
    tensors: Mapping[str, TensorEntry], kind: str, count: Callable[[str, int], None]
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the weights with those of linear layers as codes beside their scales, and notes.

    Args:
        tensors: The weights by name.
        kind: ``'fp8'``, ``'fp8_tensor'`` or ``'fp8_channel'``.
        count: Called with a name and the number of its elements that were too large, if there are any.

    Raises:
        ConfigError: There is no weight of a linear layer, or numpy is missing.
    """
    if kind == _IN_BLOCKS:
        return quantizing.quantized(tensors, count)
    return scaled_floats.quantized(tensors, kind, count)


def quantization_config(tensors: Mapping[str, TensorEntry], kind: str) -> dict[str, Any]:
    """Return the ``quantization_config`` with which transformers and vLLM load what `quantized` makes.

    Args:
        tensors: The weights as they are written.
        kind: As for `quantized`.
    """
    if kind == _IN_BLOCKS:
        return quantizing.quantization_config(tensors)
    return scaled_floats.quantization_config(tensors, kind)
