"""Finds weights that are stored as 8-bit codes with scales beside them."""

from __future__ import annotations

from collections.abc import Mapping

from mmfsdp.checkpoint.layout import TensorEntry

__all__ = ["BLOCK", "scales_of"]

BLOCK = 128
"""Rows and columns that share a scale, if neither a whole matrix nor each row has one."""
_ENDS = ("_scale_inv", "_scale")
_CODES = ("float8_e4m3fn", "float8_e5m2", "int8")


def scales_of(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the names of weights that are codes, and of their scales: those of DeepSeek-V3 and compressed-tensors.

    Args:
        tensors: The weights by name.
    """
    return {
        name: name + end
        for name, entry in tensors.items()
        for end in _ENDS
        if entry.dtype in _CODES and name + end in tensors
    }
