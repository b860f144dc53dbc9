"""Rounds numbers to another floating point dtype: to nearest, ties to even, and once.

The passes over a block are few, and so is the memory, which the next block uses again: on fresh memory each pass takes
several times as long.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from mmfsdp.checkpoint.files.elements import small_floats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Rounding"]


class Rounding:
    """Rounds one block of numbers after the other.

    Args:
        target: The dtype to round to, a floating point one.
        most: Number of elements of the largest block.
    """

    def __init__(self, target: str, most: int) -> None:
        import numpy as np

        self._target = target
        self._is_float8 = target.startswith("float8")
        kept = np.uint16 if target == "bfloat16" else np.uint8 if self._is_float8 else np.dtype(target)
        self._result = np.empty(most, kept)
        self._near = np.empty(most, np.float32)
        self._bits = np.empty(most, np.uint32)
        self._low = np.empty(most, np.uint16)
        self._codes = np.empty(most if target == "float16" else 0, np.uint32)
        self._indices = np.empty(most if self._is_float8 else 0, np.intp)

    def __call__(self, given: NDArray[Any]) -> tuple[memoryview, int]:
        """Round a block.

        Args:
            given: The numbers, one-dimensional.

        Returns:
            Their bytes in the dtype, which the next block overwrites, and the number of elements that were too large.
        """
        import numpy as np

        result = self._result[: len(given)]
        with np.errstate(all="ignore"):
            if self._target == "bfloat16":
                lost = self._to_bfloat16(given, result)
            elif self._is_float8:
                lost = self._to_float8(given, result)
            elif self._target == "float16" and given.dtype == np.float32 and _lies_below(_FINITE_HALF, given):
                self._to_float16(given, result.view(np.uint16))
                lost = 0
            else:
                result[:] = given
                # Of the numbers given, because reductions of float16 are slow.
                finite = _lies_below(float(np.finfo(result.dtype).max), given)
                lost = 0 if finite else _became_infinite(result, given)
        return result.astype(result.dtype.newbyteorder("<"), copy=False).view(np.uint8).data, lost

    def of_shares(self, given: NDArray[np.float32], divisors: NDArray[np.float32]) -> tuple[memoryview, int]:
        """Divide a block of rows, and round what comes out; see ``__call__``.

        Args:
            given: The numbers, two-dimensional.
            divisors: What each is divided by; its shape is broadcast.
        """
        import numpy as np

        shares = self._near[: given.size]
        with np.errstate(all="ignore"):
            np.divide(given, divisors, out=shares.reshape(given.shape))
        return self(shares)

    def _to_bfloat16(self, given: NDArray[Any], words: NDArray[np.uint16]) -> int:
        import numpy as np

        near = given
        if given.dtype != np.float32:
            near = self._near[: len(given)]
            near[:] = given
        if not _lies_below(_FINITE, near):
            words[:], lost = _any_to_bfloat16(given)
            return lost
        bits, sums, low = near.view(np.uint32), self._bits[: len(given)], self._low[: len(given)]
        np.add(bits, np.uint32(0x8000), out=sums)
        np.right_shift(sums, np.uint32(16), out=sums)
        words[:] = sums
        low[:] = bits  # the lower halves
        if (ties := np.flatnonzero(low == 0x8000)).size:
            words[ties] &= np.uint16(0xFFFE)
            if near is not given:
                # Rounding twice goes wrong only where the first result is a tie that the number is not.
                wrong = ties[near[ties] != given[ties]]
                words[wrong] = _any_to_bfloat16(given[wrong])[0]
        return 0

    def _to_float16(self, given: NDArray[np.float32], result: NDArray[np.uint16]) -> None:
        """Round numbers that stay finite; numpy's own cast takes ten times as long."""
        import numpy as np

        bits, sizes, codes = given.view(np.uint32), self._bits[: len(given)], self._codes[: len(given)]
        np.bitwise_and(bits, np.uint32(0x7FFFFFFF), out=sizes)
        np.right_shift(sizes, np.uint32(13), out=codes)
        np.bitwise_and(codes, np.uint32(1), out=codes)
        np.add(codes, np.uint32(0xFFF), out=codes)  # half a unit, less one where the last digit is even
        np.add(codes, sizes, out=codes)
        np.right_shift(codes, np.uint32(13), out=codes)
        np.subtract(codes, np.uint32(112 << 10), out=codes)  # the bias is 15, and not 127
        subnormal = sizes < 0x38800000  # 2**-14
        if subnormal.any():
            # Beside 0.5 a unit of float32 is 2**-24, as in subnormal numbers, so that the sum is rounded as they are.
            np.add(sizes.view(np.float32), np.float32(0.5), out=sizes.view(np.float32), where=subnormal)
            np.subtract(sizes, np.uint32(0x3F000000), out=codes, where=subnormal)
        np.right_shift(bits, np.uint32(16), out=sizes)
        np.bitwise_and(sizes, np.uint32(0x8000), out=sizes)  # the signs
        np.bitwise_or(codes, sizes, out=codes)
        result[:] = codes

    def _to_float8(self, given: NDArray[Any], result: NDArray[np.uint8]) -> int:
        import numpy as np

        bits, words = _single(given).view(np.uint32), self._bits[: len(given)]
        # Sixteen bits are enough to round from, if the last of them says whether there were more: see _to_odd.
        np.bitwise_and(bits, np.uint32(0xFFFF), out=words)
        np.add(words, np.uint32(0xFFFF), out=words)
        np.bitwise_or(words, bits, out=words)
        np.right_shift(words, np.uint32(16), out=words)
        indices = self._indices[: len(given)]
        indices[:] = words
        codes, too_large, middle = _float8_codes(self._target)
        np.take(codes, indices, out=result, mode="clip")  # "raise" would make a copy of the result
        return 0 if _lies_below(middle, given) else int(np.count_nonzero(too_large[indices]))


_FINITE_HALF = 65520.0  # from here on, numbers round to infinity in float16
_FINITE = 3.39e38  # a little below where rounding to bfloat16 goes to infinity


def _lies_below(limit: float, given: NDArray[Any]) -> bool:
    """Tell whether all elements are numbers of a smaller magnitude, by two reductions."""
    return not given.size or bool(given.max() < limit and given.min() > -limit)


def _became_infinite(result: NDArray[Any], given: NDArray[Any]) -> int:
    import numpy as np

    return int((np.isinf(result) & np.isfinite(given)).sum())


def _any_to_bfloat16(given: NDArray[Any]) -> tuple[NDArray[np.uint16], int]:
    """Return any numbers as bfloat16 words, and how many finite elements became infinite."""
    import numpy as np

    bits = _single(given).view(np.uint32)
    # Half a unit of the last digit that stays, less one where that digit is even: ties go to even.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    words = np.where(np.isnan(given), quiet, rounded).astype(np.uint16)
    infinite = (words & np.uint16(0x7FFF)) == 0x7F80
    return words, int((infinite & np.isfinite(given)).sum())


@cache
def _float8_codes(dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.bool_], float]:
    """Return the code of each 16-bit word (half a float32), which words are too large, and the limit of these."""
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
    both = np.concatenate([codes, codes | np.uint8(0x80)]), np.concatenate([too_large, too_large])
    return *both, float(steps[-2:].mean())


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
