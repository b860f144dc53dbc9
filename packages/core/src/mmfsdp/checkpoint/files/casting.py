"""Casts floating point tensors block by block while they are copied, rounding to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import small_floats, tensor_blocks, values
from mmfsdp.checkpoint.geometry import cut
from mmfsdp.checkpoint.layout import ComputedEntry, TensorEntry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["CastEntry", "cast_block"]

_BLOCK = 1 << 19  # bytes of the source: what is made of it fits the second-level cache too


@dataclass(frozen=True, slots=True)
class CastEntry(ComputedEntry):
    """A tensor that is written with another dtype."""

    @classmethod
    def of(cls, source: TensorEntry, dtype: str, overflow: Callable[[int], None]) -> ComputedEntry:
        """Return a tensor cast to another dtype; one that is computed is rounded to that dtype at once."""
        if isinstance(source, ComputedEntry):
            return source.cast(dtype, overflow)
        return cls(source.name, dtype, source.shape, source.chunks(), (source,), overflow)

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> ComputedEntry:
        return CastEntry.of(cut(self.parts[0], offsets, sizes), self.dtype, self.overflow)

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        [source], overflowed = self.parts, 0
        for block in tensor_blocks(files, source, _BLOCK):
            data, count = cast_block(block, source.dtype, self.dtype)
            overflowed += count
            yield data
        if overflowed:
            self.overflow(overflowed)


def cast_block(block: memoryview, source: str, target: str) -> tuple[memoryview, int]:
    """Cast elements to another dtype; return them and the number of elements that were too large for it.

    Args:
        block: The elements, packed.
        source: Their dtype.
        target: The wanted dtype, a floating point one.
    """
    import numpy as np

    given = values(block, source)
    with np.errstate(all="ignore"):
        if target == "bfloat16":
            words, count = _to_bfloat16(given)
            return _bytes(words), count
        if target.startswith("float8"):
            codes, count = _to_float8(given, target)
            return _bytes(codes), count
        cast = given.astype(np.dtype(target).newbyteorder("<"))
        infinite = np.isinf(cast)
        return _bytes(cast), int((infinite & np.isfinite(given)).sum()) if infinite.any() else 0


def _bytes(array: NDArray[Any]) -> memoryview:
    import numpy as np

    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


def _to_bfloat16(given: NDArray[Any]) -> tuple[NDArray[np.uint16], int]:
    """Return numbers as bfloat16 words, and how many finite elements became infinite."""
    import numpy as np

    if given.dtype == np.float32 and _is_ordinary(given):
        return _rounded(given), 0
    if given.dtype == np.float64 and _is_ordinary(near := given.astype(np.float32)):
        words = _rounded(near)
        # Rounding twice goes wrong only where the first result lies half way between two numbers.
        halfway = np.flatnonzero((near.view(np.uint32) & np.uint32(0xFFFF)) == 0x8000)
        words[halfway] = _rounded(_to_odd(given[halfway]))
        return words, 0
    bits = _single(given).view(np.uint32)
    # Half a unit of the last place that stays, less one where that place is even: ties go to even.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    words = np.where(np.isnan(given), quiet, rounded).astype(np.uint16)
    infinite = (words & np.uint16(0x7FFF)) == 0x7F80
    return words, int((infinite & np.isfinite(given)).sum())


def _to_float8(given: NDArray[Any], dtype: str) -> tuple[NDArray[np.uint8], int]:
    """Return 8-bit floats, and how many elements were too large.

    As with torch, what is too large becomes infinite in float8_e5m2; float8_e4m3fn has no infinity, and what is too
    large, infinity too, becomes its largest number.
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
    """Round numbers as ``_to_bfloat16`` does, in few passes over memory."""
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
