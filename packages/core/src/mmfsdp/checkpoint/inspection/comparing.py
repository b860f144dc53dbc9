"""Compares two tensors element by element, in blocks: exactly, or as numbers with a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import equal_bytes, has_numpy, raw, tensor_blocks, values
from mmfsdp.checkpoint.geometry import without_repeats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ValueDifference", "compare_tensors"]

# Per block. Threads wait for Python's lock between the passes: with a quarter of this, two of them gain nothing.
_ELEMENTS = 1 << 19
_PIECE = 1 << 16  # of these elements that are looked at one by one; with fewer, too, threads wait
_FEW = 8  # one element in so many
_HUGE = 2.0**100
# Of 16-bit floats: how many steps there are from a power of two to the next, and the word of infinity.
_STEPS = {"bfloat16": (1 << 7, 0x7F80), "float16": (1 << 10, 0x7C00)}
_LEAST, _DECADES = -8, 11  # the histogram begins with what is below 1e-8, and ends with what is 10 or more


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the elements of a tensor differ."""

    name: str
    """The tensor."""
    elements: int
    """Number of elements."""
    differing: int | None
    """Number of elements that differ by more than is tolerated; ``None`` without numpy, which counts them."""
    max_abs: float | None
    """Largest absolute difference among those; ``None`` without numpy, or where only NaNs differ."""
    max_rel: float | None
    """Largest difference relative to the element of the second tensor, likewise."""
    decades: tuple[int, ...] = ()
    """How many of those differ by less than 1e-8 of the second tensor's element, by less than 1e-7, and so on up to
    less than 10 times, and by more; empty unless asked for."""


def compare_tensors(
    files: OpenFiles,
    name: str,
    one: TensorEntry,
    two: TensorEntry,
    *,
    rtol: float,
    atol: float,
    advance: Callable[[int], None],
    histogram: bool = False,
) -> ValueDifference | None:
    """Return how two tensors of the same shape differ, or ``None`` if they do not.

    Without tolerance and with one dtype, elements are equal if their bits are. Otherwise they are equal if
    ``abs(a - b) <= atol + rtol * abs(b)``, or if both are NaN.

    Args:
        files: The open files to read with.
        name: What to call the tensor.
        one: The first.
        two: The second; it may be of another dtype.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        advance: Called with the number of elements after each block.
        histogram: Count the differences by their size, too. Needs numpy.
    """
    elements = one.numel
    [one, two], times = without_repeats(one, two)
    differing, largest, relative, counted = 0, -1.0, -1.0, True
    decades = [0] * _DECADES if histogram else []
    blocks = zip(
        tensor_blocks(files, one, _ELEMENTS * itemsize(one.dtype)),
        tensor_blocks(files, two, _ELEMENTS * itemsize(two.dtype)),
        strict=True,
    )
    nearness = None  # made when it is needed: equal bytes do without numpy
    for a, b in blocks:
        if one.dtype != two.dtype or not equal_bytes(a, b):
            if nearness is None and not has_numpy():
                differing, counted = 1, False
                break
            nearness = nearness or _Nearness(one, two, rtol, atol)
            for count, absolute, ratio in _differences(a, b, nearness, decades):
                differing, largest, relative = differing + count, max(largest, absolute), max(relative, ratio)
        advance(len(a) // itemsize(one.dtype) * times)
    if not differing:
        return None
    known = counted and largest >= 0
    return ValueDifference(
        name,
        elements,
        differing * times if counted else None,
        largest if known else None,
        relative if known and relative >= 0 else None,
        tuple(number * times for number in decades),
    )


def _differences(
    a: memoryview, b: memoryview, nearness: _Nearness, decades: list[int]
) -> Iterator[tuple[int, float, float]]:
    """Yield how many elements of two blocks differ, and by how much, in pieces, which need little memory."""
    import numpy as np

    words = [raw(block, dtype) for block, dtype in zip((a, b), nearness.dtypes, strict=True)]
    if nearness.exact:
        unequal = words[0] != words[1]
        where = np.flatnonzero(unequal.any(axis=1) if unequal.ndim == 2 else unequal)
    else:
        where = nearness.doubtful(a, b)
    for begin in range(0, where.size, _PIECE):
        some = where[begin : begin + _PIECE]
        x, y = (
            values(part[some].reshape(-1).view(np.uint8).data, dtype)
            for part, dtype in zip(words, nearness.dtypes, strict=True)
        )
        yield _sizes(x, y, nearness, decades)


def _sizes(x: NDArray[Any], y: NDArray[Any], nearness: _Nearness, decades: list[int]) -> tuple[int, float, float]:
    """Return how many of some elements differ, and the largest differences, absolute and relative."""
    import numpy as np

    distance, scale = _distance(x, y)
    if not nearness.exact:
        with np.errstate(all="ignore"):
            within = np.isfinite(distance) & (distance <= nearness.atol + nearness.rtol * scale)
            close = within | (x == y) | (_nan(x) & _nan(y))
        distance, scale = distance[~close], scale[~close]
    known = ~np.isnan(distance)
    distance, scale = distance[known], scale[known]
    count = len(known)
    with np.errstate(all="ignore"):
        ratio = distance / scale
    ratio = ratio[~np.isnan(ratio)]
    if decades:
        with np.errstate(all="ignore"):
            powers = np.clip(np.floor(np.log10(ratio)), _LEAST - 1, _LEAST + _DECADES - 2)
        for index, number in enumerate(np.bincount((powers - (_LEAST - 1)).astype(np.int64))):
            decades[index] += int(number)
    return count, float(distance.max(initial=-1.0)), float(ratio.max(initial=-1.0))


class _Nearness:
    """Finds the elements of two tensors that may differ by more than is tolerated, in few passes over small blocks.

    Args:
        one: The first tensor.
        two: The second.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """

    def __init__(self, one: TensorEntry, two: TensorEntry, rtol: float, atol: float) -> None:
        import numpy as np

        self.rtol, self.atol = rtol, atol
        self.dtypes = one.dtype, two.dtype
        self.exact = one.dtype == two.dtype and not rtol and not atol  # bits count
        self._wide: type[np.float32 | np.float64] = np.float64 if "float64" in self.dtypes else np.float32
        self._rooms = np.empty((3, min(_ELEMENTS, one.numel)), self._wide)
        # The error of float32 is some 2**-24 of a number. A limit that is smaller by more only adds doubtful elements.
        self._factor, self._more = (
            self._wide(min(given, _HUGE) * (1 - 2**-20) if given > 1 / _HUGE else 0) for given in (rtol, atol)
        )
        self._accurate = float(np.finfo(self._wide).tiny) * 2**24  # below, products lose digits
        # Where only the relative tolerance counts, quotients near 1 tell it; their error is 2**-24, too.
        margin = (1 + rtol) * 2**-22
        self._quotients = (1 - rtol + margin, 1 + rtol - margin) if not atol and 2**-20 < rtol < _HUGE else None
        steps, self._infinity = _STEPS.get(one.dtype, (0, 0)) if one.dtype == two.dtype else (0, 0)
        self._steps = int(min(rtol, 0.5) * steps)  # one is at most 1 / steps of the number
        self._normal = steps  # the word of the smallest normal number

    def doubtful(self, a: memoryview, b: memoryview) -> NDArray[np.intp]:
        """Return the positions of all elements but those that are certainly within the tolerance.

        Args:
            a: A block of the first tensor.
            b: The same elements of the second.
        """
        import numpy as np

        if self._steps and (beyond := self._beyond_steps(a, b)) is not None:
            return beyond
        x, y = (values(*given) for given in zip((a, b), self.dtypes, self._rooms[:2].view(np.float32), strict=True))
        if x.dtype.kind != "f" or y.dtype.kind != "f":
            return np.arange(len(x))
        gap, limit, shares = self._rooms[:, : len(x)]
        with np.errstate(all="ignore"):
            if self._quotients:
                low, high = self._quotients
                np.divide(x, y, out=shares, dtype=self._wide)
                if shares.min() >= low and shares.max() <= high:  # neither holds for a NaN, as of 0 / 0
                    return np.empty(0, np.intp)
                where = np.flatnonzero(~((shares >= low) & (shares <= high)))
                if where.size * _FEW < len(x):  # more may be zeros in both, which take long to look at one by one
                    return where
            np.subtract(x, y, out=gap, dtype=self._wide)
            np.abs(gap, out=gap)
            np.multiply(y, self._factor, out=limit, dtype=self._wide)
            np.abs(limit, out=limit)
            if self._more:
                np.add(limit, self._more, out=limit)
            np.subtract(gap, limit, out=gap)  # not a number for infinities, so that they are doubtful
            if gap.max() <= 0 and limit.min() >= self._accurate:
                return np.empty(0, np.intp)
            return np.flatnonzero(~((gap <= 0) & ((limit >= self._accurate) | (gap == -limit))))

    def _beyond_steps(self, a: memoryview, b: memoryview) -> NDArray[np.intp] | None:
        """Return the same of 16-bit floats, found from their words alone; ``None`` if those are too many to look at.

        Words of one sign are in the order of the numbers, and each is one step from the next.
        """
        import numpy as np

        x, y = (np.frombuffer(block, "<u2") for block in (a, b))
        gaps, sizes = self._rooms[2].view(np.uint16).reshape(2, -1)[:, : len(x)]
        least, most = self._normal + self._steps, self._infinity - 1 - self._steps
        np.subtract(x, y, out=gaps)
        np.add(gaps, np.uint16(self._steps), out=gaps)  # so that what is near is small, and not around zero
        np.bitwise_and(y, np.uint16(0x7FFF), out=sizes)
        np.subtract(sizes, np.uint16(least), out=sizes)  # what is smaller becomes large
        if gaps.max() <= 2 * self._steps and sizes.max() <= most - least:
            return np.empty(0, np.intp)
        special = (sizes > most - least) & (gaps != self._steps)
        where = np.flatnonzero((gaps > 2 * self._steps) | special)
        return where if where.size * _FEW < len(x) else None


def _distance(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``abs(x - y)`` and ``abs(y)`` as float64, exact for integers before they are rounded."""
    import numpy as np

    if x.dtype == y.dtype and x.dtype.kind in "iu":
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        with np.errstate(all="ignore"):
            gap = np.where(x > y, x - y, y - x).astype(x.dtype).view(unsigned)
        return gap.astype(np.float64), np.abs(y.astype(np.float64))
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        return np.abs(x.astype(wide) - y.astype(wide)), np.abs(y.astype(wide))


def _nan(x: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    return np.isnan(x) if x.dtype.kind in "fc" else np.zeros(len(x), bool)
