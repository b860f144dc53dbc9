"""Rounds numbers to dtypes that numpy does not have: bfloat16 and 8-bit floats, to nearest, ties to even, once."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from mmfsdp.checkpoint.files.numeric import small_floats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["to_bfloat16", "to_float8"]


def to_bfloat16(given: NDArray[Any]) -> tuple[NDArray[np.uint16], int]:
    """Return bfloat16 words, and how many finite elements became infinite.

    Args:
        given: Elements of any floating point or integer dtype.
    """
    import numpy as np

    if given.dtype == np.float32 and _is_ordinary(given):
        return _rounded(given), 0
    bits = _single(given).view(np.uint32)
    # Half a unit of the last place that stays, less one where that place is even: ties go to even.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    words = np.where(np.isnan(given), quiet, rounded).astype(np.uint16)
    infinite = (words & np.uint16(0x7FFF)) == 0x7F80
    return words, int((infinite & np.isfinite(given)).sum())


def to_float8(given: NDArray[Any], dtype: str) -> tuple[NDArray[np.uint8], int]:
    """Return 8-bit floats, and how many elements were too large.

    As with torch, what is too large becomes infinite in float8_e5m2; float8_e4m3fn has no infinity, and what is too
    large, infinity too, becomes its largest number.

    Args:
        given: Elements of any floating point or integer dtype.
        dtype: ``'float8_e4m3fn'`` or ``'float8_e5m2'``.
    """
    import numpy as np

    bits = _single(given).view(np.uint32)
    # Sixteen bits are enough to round from, if the last of them says whether there were more: see _to_odd.
    words = bits >> np.uint32(16)
    words |= (bits & np.uint32(0xFFFF)) != 0
    codes, too_large = _float8_codes(dtype)
    return codes[words], int(np.count_nonzero(too_large[words]))


def _is_ordinary(given: NDArray[np.float32]) -> bool:
    """Tell whether all elements are numbers that stay finite in bfloat16, by two reductions."""
    most = 3.39e38  # a little below where rounding goes to infinity
    return not given.size or (float(given.max()) < most and float(given.min()) > -most)


def _rounded(given: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round numbers as ``to_bfloat16`` does, in few passes over memory."""
    import numpy as np

    bits = given.view(np.uint32)
    words = bits >> np.uint32(16)
    words &= np.uint32(1)
    words += np.uint32(0x7FFF)
    words += bits
    words >>= np.uint32(16)
    return words.astype(np.uint16)


@cache
def _float8_codes(dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the code that each 16-bit word becomes, which is the first half of a float32, and which are too large."""
    import numpy as np

    decoded = small_floats(dtype)[:0x80].astype(np.float64)
    finite = decoded[np.isfinite(decoded)]
    # Beyond the largest lies the number that would come next; what rounds to that is too large.
    steps = np.append(finite, 2 * finite[-1] - finite[-2])
    given = (np.arange(0x8000, dtype=np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    below = np.clip(np.searchsorted(steps, given, "right") - 1, 0, finite.size - 1)
    middle = (steps[below] + steps[below + 1]) / 2
    codes = (below + ((given > middle) | ((given == middle) & (below % 2 == 1)))).astype(np.uint8)
    codes[np.isnan(given)] = 0x7F
    too_large = (codes == finite.size) & ~np.isnan(given)
    if np.isinf(decoded).any():
        too_large &= np.isfinite(given)
    else:
        codes[too_large] = finite.size - 1
    return np.concatenate([codes, codes | np.uint8(0x80)]), np.concatenate([too_large, too_large])


def _single(given: NDArray[Any]) -> NDArray[np.float32]:
    import numpy as np

    return _to_odd(given) if given.dtype == np.float64 else given.astype(np.float32, copy=False)


def _to_odd(given: NDArray[Any]) -> NDArray[np.float32]:
    """Round float64 to float32 so that rounding once more is right: cut off, and set the last bit if that lost any.

    Rounding to nearest twice can turn a value next to a tie into the tie: Boldo and Melquiond, "When double rounding is
    odd", 2004.
    """
    import numpy as np

    near = given.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32).copy()
    inexact = (back != given) & ~np.isnan(given)
    bits[inexact & (np.abs(back) > np.abs(given))] -= np.uint32(1)
    bits[inexact] |= np.uint32(1)
    return bits.view(np.float32)
