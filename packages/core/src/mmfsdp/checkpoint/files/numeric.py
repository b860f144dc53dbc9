"""Turns bytes of any dtype into numpy arrays; numpy is imported only when a function here is called."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["has_numpy", "raw", "require_numpy", "small_floats", "values"]

# dtype -> (bits of the exponent, bits of the mantissa, bias, what the largest codes mean):
# https://arxiv.org/abs/2209.05433 for e4m3fn and e5m2, https://onnx.ai/onnx/technical/float8.html for the others.
_SMALL_FLOATS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


def require_numpy(what: str) -> None:
    """Raise unless numpy can be imported.

    Args:
        what: The feature that needs it, for the message.

    Raises:
        ConfigError: numpy is missing; the message names the command that installs it.
    """
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} needs numpy. Install it with: pip install numpy") from error


def has_numpy() -> bool:
    """Tell whether numpy can be imported."""
    try:
        require_numpy("")
    except ConfigError:
        return False
    return True


def raw(block: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements as opaque words to compare for equality, a row of two for 16-byte elements."""
    import numpy as np

    size = itemsize(dtype)
    if size == 16:
        return np.frombuffer(block, np.uint64).reshape(-1, 2)
    return np.frombuffer(block, f"<u{size}")


def values(block: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements as an array of numbers that holds each exactly.

    bfloat16 and 8-bit floats become float32; everything else stays what it is.
    """
    import numpy as np

    if dtype == "bfloat16":
        return (np.frombuffer(block, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.startswith("float8"):
        return small_floats(dtype)[np.frombuffer(block, np.uint8)]
    return np.frombuffer(block, np.dtype(dtype).newbyteorder("<"))


@cache
def small_floats(dtype: str) -> NDArray[np.float32]:
    """Return what each of the 256 codes of an 8-bit float stands for."""
    import numpy as np

    return np.array([_decoded(dtype, code) for code in range(256)], np.float32)


def _decoded(dtype: str, code: int) -> float:
    if dtype == "float8_e8m0fnu":  # powers of two only
        return float("nan") if code == 255 else 2.0 ** (code - 127)
    exponent_bits, mantissa_bits, bias, kind = _SMALL_FLOATS[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if kind == "fnuz" and code == 0x80:
        return float("nan")
    if kind == "fn" and code & 0x7F == 0x7F:
        return float("nan")
    if kind == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
