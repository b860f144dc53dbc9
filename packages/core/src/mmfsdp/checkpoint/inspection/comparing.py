"""Compares two stored tensors element by element in constant memory: bytes first, numbers where those differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.files.elements import tensor_blocks
from mmfsdp.checkpoint.files.numeric import has_numpy, raw, values
from mmfsdp.checkpoint.files.opening import OpenFiles
from mmfsdp.checkpoint.geometry.views import without_repeats
from mmfsdp.checkpoint.layout import TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ValueDifference", "compare_tensors"]

_ELEMENTS = 1 << 19  # per block


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


def compare_tensors(
    files: OpenFiles,
    name: str,
    one: TensorEntry,
    two: TensorEntry,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    advance: Callable[[int], None] | None = None,
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
    """
    elements = one.numel
    [one, two], times = without_repeats(one, two)
    differing, largest, relative, counted = 0, -1.0, -1.0, True
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
            count, absolute, ratio = _differences(a, b, one.dtype, two.dtype, rtol, atol)
            differing, largest, relative = differing + count, max(largest, absolute), max(relative, ratio)
        if advance is not None:
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
    )


def _differences(
    a: memoryview, b: memoryview, a_dtype: str, b_dtype: str, rtol: float, atol: float
) -> tuple[int, float, float]:
    import numpy as np

    x, y = values(a, a_dtype), values(b, b_dtype)
    exact = a_dtype == b_dtype
    if exact:
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
    return count, float(distance.max(initial=-1.0)), float(ratio.max(initial=-1.0))


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
