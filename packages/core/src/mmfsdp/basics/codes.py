"""Recognises weights that are stored as codes of few bits with scales beside them, by names, dtypes and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mmfsdp.basics.arguments import argument

__all__ = [
    "OtherCodes",
    "Stored",
    "block_of",
    "codes_in_units",
    "how_to_restore",
    "needless_parts",
    "not_restored",
    "other_codes",
    "parts_of_codes",
    "scales_of",
]

_SAVE_NUMBERS = "Load the model with the library that wrote it, and save it unquantised."
_ENDS = ("_scale_inv", "_scale")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
_EXPONENTS = "float8_e8m0fnu"  # a dtype of scales alone
_BLOCK = 128  # rows and columns of DeepSeek-V3's blocks
_OF_INPUTS = (".input_scale", ".scale_input")  # scales that were measured for codes
_OF_FILES = re.compile(r"(.+\.)?scaled_fp8")  # ComfyUI's mark of a file with codes
_MAY_SCALE = re.compile(r"scale|scaling_factor")
_LEARNT = re.compile(r"(logit|layer)_scale")  # parameters that scale activations, not codes
_UNITS = re.compile(r"scale|absmax|quant_map|SCB|zero")
# What distinguishes codes that are not restored: who writes them, names of their parts, and the weight's own name.
_OTHERS = (
    ("bitsandbytes (4 bits)", r"(.+)\.(?:(?:nested_)?absmax|(?:nested_)?quant_map|quant_state\..+)", "{}"),
    ("bitsandbytes (8 bits)", r"(.+)\.SCB", "{}.weight"),
    ("GPTQ or AWQ", r"(.+)\.(?:qweight|qzeros|g_idx)", "{}.weight"),
    ("torchao", r"(.+)\._weight_qdata", "{}.weight"),
    ("ModelOpt (4 bits)", r"(.+)\.weight_scale_2", "{}.weight"),
    (
        "compressed-tensors (packed, or with zero points)",
        r"(.+)\.weight_(?:packed|zero_point|global_scale)",
        "{}.weight",
    ),
    ("MXFP4", r"(.+_proj)_blocks", "{}"),
    ("HQQ", r"(.+)\.W_q", "{}.weight"),
    ("quanto", r"(.+\.weight)\._data", "{}"),
)
_OTHER = re.compile("|".join(f"(?:{pattern})" for _, pattern, _ in _OTHERS))
_FOUR_BITS = "NVFP4 or MXFP4 (4-bit floats, two to a byte)"
_SIX_BITS = "MXFP6 (6-bit floats, four to three bytes)"


class Stored(Protocol):
    """Anything with a dtype and a shape: a tensor, or a description of one."""

    @property
    def dtype(self) -> Any:
        """The dtype, or its name."""

    @property
    def shape(self) -> Sequence[int]:
        """The shape, in elements."""


class OtherCodes(NamedTuple):
    """Codes that cannot be restored here."""

    kind: str
    """Who writes them, or what they are."""
    weight: str
    """The name that the weight has in a model."""


def scales_of(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """Return the names of weights that are codes of 8 bits, and of their scales.

    They are the names of DeepSeek-V3 and compressed-tensors (the weight's name and ``_scale`` or ``_scale_inv``), of
    DeepSeek's own code (``scale`` beside ``weight``), and of ComfyUI (``scale_weight``). Whether they can be restored,
    `block_of` tells.

    Args:
        tensors: The weights by name.
    """
    found = {}
    for name, entry in tensors.items():
        if _dtype(entry) in _EIGHT_BITS and (scale := _scale_beside(name, entry, tensors)) is not None:
            found[name] = scale
    return found


def _scale_beside(name: str, codes: Stored, tensors: Mapping[str, Stored]) -> str | None:
    packs = _dtype(codes) == "int8"  # 4-bit floats, if its scales are exponents
    for scale in (name + end for end in _ENDS):
        if scale in tensors:
            return None if packs and _dtype(tensors[scale]) == _EXPONENTS else scale
    if packs or not name.endswith(".weight"):
        return None
    module = name.removesuffix("weight")
    if module + "scale_weight" in tensors:
        return module + "scale_weight"
    scale = module + "scale"
    return scale if scale in tensors and _is_of_blocks(codes, tensors[scale]) else None


def _is_of_blocks(codes: Stored, scale: Stored) -> bool:
    """Tell whether a tensor holds scales of codes, for any layer may have a parameter named ``scale``."""
    if _dtype(scale) == _EXPONENTS:
        return True
    return len(codes.shape) > 1 and tuple(scale.shape) == (
        *codes.shape[:-2],
        *(-(-size // _BLOCK) for size in codes.shape[-2:]),
    )


def block_of(codes: Stored, scale: Stored) -> tuple[int, ...] | None:
    """Return the size of the blocks that share a scale, in elements; ``None`` if the scales do not fit the codes.

    There may be one scale, one for each row, or one for each block: of 128 x 128, or for floats of other powers of two.
    Leading dimensions, as of stacked experts, have one scale for each index, or share them.

    Args:
        codes: The codes.
        scale: Their scales.
    """
    sizes, counts = tuple(codes.shape), tuple(scale.shape)
    if not sizes or not _dtype(scale).startswith(("float", "bfloat")) or len(counts) > len(sizes):
        return None
    if math.prod(counts) == 1:
        return sizes
    counts += (1,) * (len(sizes) - len(counts))
    block = tuple(_side(size, count) for size, count in zip(sizes, counts, strict=True))
    stacked = zip(block[:-2], sizes, strict=False)
    if 0 in block or not all(side in (1, size) for side, size in stacked):
        return None
    known = _dtype(codes) != "int8" or all(side in (1, size, _BLOCK) for side, size in zip(block, sizes, strict=True))
    return block if known else None


def _side(size: int, count: int) -> int:
    """Return the length of each of ``count`` blocks, or 0; at most one power of two fits."""
    if count in (1, size):
        return size if count == 1 else 1
    sides = (1 << power for power in range(1, 13))
    return next((side for side in sides if -(-size // side) == count), 0)


def needless_parts(tensors: Mapping[str, Stored], scales: Mapping[str, str]) -> set[str]:
    """Return the names of tensors that nobody needs once codes are restored: scales of codes and of their inputs.

    Args:
        tensors: The weights by name.
        scales: Names of the codes that are restored, and of their scales.
    """
    gone = {*scales.values()}
    modules = {name.removesuffix(".weight") for name in scales}
    gone |= {name for name in tensors for end in _OF_INPUTS if name.endswith(end) and name[: -len(end)] in modules}
    return gone | ({name for name in tensors if _OF_FILES.fullmatch(name)} if gone else set())


def codes_in_units(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """Return the names of 8-bit floats that are codes, and of their scales, whether or not these are read here.

    Taken for a scale is what has this word in its name, in the same module.

    Args:
        tensors: The weights by name.
    """
    floats = [
        name for name, entry in tensors.items() if _dtype(entry).startswith("float8") and _dtype(entry) != _EXPONENTS
    ]
    if not floats:
        return {}
    found = scales_of(tensors)
    scales: dict[str, list[str]] = {}
    for name in tensors:
        module, _, own = name.rpartition(".")
        if _MAY_SCALE.search(own) and not _LEARNT.search(own):
            scales.setdefault(module, []).append(name)
    codes = {}
    for name in floats:
        beside = (*scales.get(name.rpartition(".")[0], ()), *scales.get(name, ()))
        others = [other for other in beside if other != name]
        if name in found or others:
            codes[name] = found.get(name) or others[0]
    return codes


def other_codes(tensors: Mapping[str, Stored]) -> dict[str, OtherCodes]:
    """Return the parts of weights that are codes which cannot be restored here, by their names.

    Args:
        tensors: The weights by name.
    """
    return dict(_other_codes(tensors))


def _other_codes(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, OtherCodes]]:
    for name, entry in tensors.items():
        if _OTHER.fullmatch(name):
            kinds = ((kind, re.fullmatch(pattern, name), weight) for kind, pattern, weight in _OTHERS)
            yield next((name, OtherCodes(kind, weight.format(match[1]))) for kind, match, weight in kinds if match)
        elif _is_packed(name, entry, tensors):
            yield name, OtherCodes(_SIX_BITS if _dtype(entry).startswith("float6_") else _FOUR_BITS, name)


def _is_packed(name: str, entry: Stored, tensors: Mapping[str, Stored]) -> bool:
    """Tell whether elements hold several floats each, as the bytes of DeepSeek-V4's experts do."""
    if (dtype := _dtype(entry)).startswith(("float4_", "float6_")):
        return True
    if dtype not in ("int8", "uint8"):
        return False
    beside = (name + "_scale", name.removesuffix("weight") + "scale")
    return any(other in tensors and _dtype(tensors[other]) == _EXPONENTS for other in beside)


def parts_of_codes(tensors: Mapping[str, Stored]) -> dict[str, OtherCodes]:
    """Return what belongs to codes that cannot be restored here, by name: their parts, scales and zero points.

    Args:
        tensors: The weights by name.
    """
    found = other_codes(tensors)
    modules = {}
    for codes in found.values():
        modules[codes.weight] = modules[codes.weight.removesuffix(".weight")] = codes
    for name in tensors if found else ():
        module, _, own = name.rpartition(".")
        if module in modules and _UNITS.search(own) and not _LEARNT.search(own):
            found.setdefault(name, modules[module])
    return found


def how_to_restore(name: str, tensors: Mapping[str, Stored]) -> str:
    """Return what to do about one of `codes_in_units` where numbers are needed, as a sentence.

    Args:
        name: The codes.
        tensors: The weights by name.
    """
    if others := not_restored(tensors):
        return others
    scale = scales_of(tensors).get(name)
    if scale is not None and block_of(tensors[name], tensors[scale]) is not None:
        return f"Add {argument('quantize', 'none')}, which restores the weights first."
    return _SAVE_NUMBERS


def not_restored(tensors: Mapping[str, Stored]) -> str:
    """Return what codes are that cannot be restored here, as a sentence with the remedy; empty if there are none.

    Args:
        tensors: All weights by name.
    """
    for name, codes in _other_codes(tensors):
        return f"{name!r} is of weights quantised by {codes.kind}, which mmfsdp does not restore. {_SAVE_NUMBERS}"
    return ""


def _dtype(entry: Stored) -> str:
    return str(entry.dtype).removeprefix("torch.")
