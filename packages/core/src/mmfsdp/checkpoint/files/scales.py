"""Finds weights that are stored as codes with scales beside them, and says of which kind they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from mmfsdp.checkpoint.entries import TensorEntry

__all__ = ["BLOCK", "codes_in_units", "how_to_restore", "not_restored", "scales_of"]

BLOCK = 128
"""Rows and columns that share a scale, if neither a whole matrix nor each row has one."""
_SAVE_NUMBERS = "Load the model with the library that wrote it, and save it unquantised."
_ENDS = ("_scale_inv", "_scale")
_CODES = ("float8_e4m3fn", "float8_e5m2", "int8")
# Names that tell of codes that are not restored, and who writes them.
_OTHERS = {
    "bitsandbytes (4 bits)": r"\.weight\.((nested_)?absmax|(nested_)?quant_map|quant_state\..+)$",
    "bitsandbytes (8 bits)": r"\.SCB$",
    "GPTQ or AWQ": r"\.(qweight|qzeros|g_idx)$",
    "torchao": r"\._weight_qdata$",
    "ModelOpt (4 bits)": r"\.weight_scale_2$",
    "compressed-tensors (packed, or with zero points)": r"\.weight_(packed|zero_point|global_scale)$",
    "MXFP4": r"_proj_blocks$",
}


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


def codes_in_units(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the names of 8-bit floats that are codes, and of their scales, whether or not these are read here.

    Taken for a scale is what has this word in its name, in the same module.

    Args:
        tensors: The weights by name.
    """
    found = scales_of(tensors)
    scales: dict[str, list[str]] = {}
    for name in tensors:
        module, _, own = name.rpartition(".")
        if "scale" in own:
            scales.setdefault(module, []).append(name)
    codes = {}
    for name, entry in tensors.items():
        if entry.dtype.startswith("float8") and entry.dtype != "float8_e8m0fnu":  # which is always of scales
            others = [other for other in scales.get(name.rpartition(".")[0], ()) if other != name]
            if name in found or others:
                codes[name] = found.get(name) or others[0]
    return codes


def how_to_restore(name: str, tensors: Mapping[str, TensorEntry]) -> str:
    """Return what to do about one of `codes_in_units` where numbers are needed, as a sentence.

    Args:
        name: The codes.
        tensors: The weights by name.
    """
    if name in scales_of(tensors):
        return "Add quantize='none', which restores the weights first."
    return not_restored(tensors) or _SAVE_NUMBERS


def not_restored(names: Iterable[str]) -> str:
    """Return what codes are that cannot be restored here, as a sentence with the remedy; empty if there are none.

    Args:
        names: The names of all weights.
    """
    for name in names:
        if kind := next((kind for kind, pattern in _OTHERS.items() if re.search(pattern, name)), None):
            return f"{name!r} is of weights quantised by {kind}, which mmfsdp does not restore. {_SAVE_NUMBERS}"
    return ""
