"""Names, sizes and codes of tensor dtypes, without importing torch.

``'float16'``, ``'torch.float16'``, ``torch.float16``, ``'fp16'`` and ``'half'`` all become ``'float16'``.
"""

from __future__ import annotations

from reprlib import repr as brief
from typing import Any

from mmfsdp.errors import ConfigError, closest

__all__ = [
    "DTYPES",
    "canonical_dtype",
    "from_safetensors_code",
    "is_floating_point",
    "itemsize",
    "numbers_per_element",
    "safetensors_code",
    "to_torch",
    "torch_name",
]

# Canonical name -> (bytes per element, safetensors code). The format's own list gives the codes:
# https://github.com/huggingface/safetensors (`Dtype` in safetensors/src/tensor.rs); None where it has none.
DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "float4_e2m1fn_x2": (1, "F4"),  # two numbers in a byte, which is torch's element; safetensors counts the numbers
    "float6_e2m3fn_x4": (3, "F6_E2M3"),  # four numbers in three bytes, named after torch's F4: torch itself has none
    "float6_e3m2fn_x4": (3, "F6_E3M2"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex64": (8, "C64"),
    "complex128": (16, None),
}

_ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "double": "float64",
    "fp64": "float64",
    "f64": "float64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "byte": "uint8",
    "char": "int8",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
}

_NUMBERS = {"float4_e2m1fn_x2": 2, "float6_e2m3fn_x4": 4, "float6_e3m2fn_x4": 4}
_NOT_OF_TORCH = ("float6_e2m3fn_x4", "float6_e3m2fn_x4")
_FROM_CODE = {code: name for name, (_, code) in DTYPES.items() if code is not None}


def canonical_dtype(dtype: object) -> str:
    """Return the canonical name of a dtype given in any spelling.

    Args:
        dtype: A ``torch.dtype``, or a string such as ``'bf16'``, ``'torch.bfloat16'``, ``'BFloat16'``.

    Raises:
        ConfigError: No such dtype exists; the message names the nearest one.
    """
    spelling = str(dtype).strip().lower().removeprefix("torch.")
    name = _ALIASES.get(spelling, spelling)
    if name not in DTYPES:
        hint = closest(spelling, [*DTYPES, *_ALIASES]) or f" Known dtypes: {', '.join(DTYPES)}."
        raise ConfigError(f"{dtype!r} is not a dtype.{hint}")
    return name


def itemsize(dtype: object) -> int:
    """Return the bytes that one element of ``dtype`` takes."""
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None  # asked for once per tensor, and mostly canonical
    return (known or DTYPES[canonical_dtype(dtype)])[0]


def numbers_per_element(dtype: object) -> int:
    """Return how many numbers share an element of ``dtype``, along the last dimension."""
    return _NUMBERS.get(canonical_dtype(dtype), 1)


def is_floating_point(dtype: object) -> bool:
    """Tell whether ``dtype`` is a real floating point dtype (complex dtypes and packed ones are not)."""
    name = canonical_dtype(dtype)
    return name.startswith(("float", "bfloat")) and numbers_per_element(name) == 1


def safetensors_code(dtype: object) -> str:
    """Return the code that a safetensors header uses for ``dtype``.

    Raises:
        ConfigError: The format has no code for it.
    """
    name = canonical_dtype(dtype)
    code = DTYPES[name][1]
    if code is None:
        raise ConfigError(f"safetensors cannot hold dtype {name!r}. Cast it, or write a .pth file instead.")
    return code


def from_safetensors_code(code: str) -> str:
    """Return the canonical name for a safetensors dtype code.

    Raises:
        ConfigError: The code is unknown.
    """
    if not isinstance(code, str):
        raise ConfigError(f"{brief(code)} is not a safetensors dtype code, which is text.")
    if code not in _FROM_CODE:
        raise ConfigError(
            f"{code!r} is not a dtype of safetensors that this version of mmfsdp knows.{closest(code, _FROM_CODE)} If "
            "it is newer than this version, update mmfsdp."
        )
    return _FROM_CODE[code]


def torch_name(dtype: object) -> str:
    """Return the name that torch has for ``dtype``, which a pickled tensor needs.

    Raises:
        ConfigError: Torch has none.
    """
    name = canonical_dtype(dtype)
    if name in _NOT_OF_TORCH:
        raise ConfigError(
            f"Only safetensors holds {name!r} ({safetensors_code(name)}): torch has no such dtype. Write a "
            ".safetensors file, or cast the tensors with the library that wrote them."
        )
    return name


def to_torch(dtype: object) -> Any:
    """Return the ``torch.dtype`` of a name; imports torch.

    Raises:
        ConfigError: No such dtype exists, or the installed torch does not have it.
    """
    import torch

    name = torch_name(dtype)
    if not hasattr(torch, name):
        raise ConfigError(f"torch {torch.__version__} has no dtype {name!r}; install a newer torch.")
    return getattr(torch, name)
