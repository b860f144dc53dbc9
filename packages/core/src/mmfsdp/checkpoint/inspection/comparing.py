"""Compares two tensors element by element, in blocks: exactly, or as numbers with a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import has_numpy, raw, tensor_blocks, values
from mmfsdp.checkpoint.geometry import without_repeats
from mmfsdp.checkpoint.layout import TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ValueDifference", "compare_tensors"]

_ELEMENTS = 1 << 17  # per block: two of them fit the second-level cache, in float64 too
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
    for a, b in blocks:
        if one.dtype != two.dtype or a != b:
            if one.dtype == two.dtype and not has_numpy():
                differing, counted = 1, False
                break
            count, absolute, ratio = _differences(a, b, one.dtype, two.dtype, rtol, atol, decades)
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
    a: memoryview, b: memoryview, a_dtype: str, b_dtype: str, rtol: float, atol: float, decades: list[int]
) -> tuple[int, float, float]:
    import numpy as np

    x, y = values(a, a_dtype), values(b, b_dtype)
    exact = a_dtype == b_dtype
    if rtol or atol or not exact:
        where = _far(x, y, rtol, atol)
        if where is not None:
            if not where.size:
                return 0, -1.0, -1.0
            x, y = x[where], y[where]
    elif exact:
        unequal = raw(a, a_dtype) != raw(b, b_dtype)
        where = np.flatnonzero(unequal.any(axis=1) if unequal.ndim == 2 else unequal)
        x, y = x[where], y[where]
    distance, scale = _distance(x, y)
    if not exact or rtol or atol:
        with np.errstate(all="ignore"):
            within = np.isfinite(distance) & (distance <= atol + rtol * scale)
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
        for place, number in enumerate(np.bincount((powers - (_LEAST - 1)).astype(np.int64))):
            decades[place] += int(number)
    return count, float(distance.max(initial=-1.0)), float(ratio.max(initial=-1.0))


def _far(x: NDArray[Any], y: NDArray[Any], rtol: float, atol: float) -> NDArray[Any] | None:
    """Return where real numbers are not close; ``None`` for infinities, NaNs and integers, which take more care."""
    import numpy as np

    if x.dtype.kind != "f" or y.dtype.kind != "f":
        return None
    gap, limit = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(all="ignore"):
        np.subtract(gap, limit, out=gap)
        np.abs(gap, out=gap)
        if not gap.max(initial=0.0) < np.inf:
            return None
        np.abs(limit, out=limit)
        limit *= rtol
        limit += atol
    return np.flatnonzero(gap > limit)


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
