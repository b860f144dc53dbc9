"""The figures that are kept of a tensor, the sum of figures of its boxes, and the distance of two tensors. No torch."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from struct import Struct

__all__ = ["BITS", "ERROR", "FIRST", "PLACED", "Figures", "add", "cosine", "distance", "factor", "where"]

BITS = 32
"""Numbers in a sketch."""
ERROR = 1 / math.sqrt(2 * BITS)
"""The standard error of a distance that is estimated from two sketches, as a share of it."""

FIRST = 5
"""Numbers before a sketch."""
PLACED = 16
"""Numbers after it, which tell where a difference lies."""

_FORM = Struct(f"<{FIRST + BITS}d{PLACED}f")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a tensor or of a box of it."""

    total: float
    """The sum of the elements."""
    square: float
    """The sum of their squares."""
    low: float
    high: float
    odd: int
    """How many elements are infinite or NaN."""
    sketch: tuple[float, ...]
    """Sums of the elements with random signs."""
    placed: tuple[float, ...]
    """The last of these sums again, with elements times where they are along the first dimension, from 0 to 1."""

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))

    @property
    def norm(self) -> float:
        """The square root of the sum of squares."""
        return math.sqrt(self.square) if self.square >= 0 else math.nan

    @classmethod
    def of(cls, values: Sequence[float]) -> Figures:
        """Return the figures from their values in order."""
        total, square, low, high, odd = values[:FIRST]
        middle = FIRST + BITS
        return cls(total, square, low, high, int(odd), tuple(values[FIRST:middle]), tuple(values[middle:]))

    @classmethod
    def unpack(cls, text: str) -> Figures:
        """Return the figures that were written as bytes in base64: FIRST + BITS of float64, PLACED of float32.

        Raises:
            ValueError: The text is something else.
        """
        try:
            return cls.of(_FORM.unpack(b64decode(text, validate=True)))
        except Exception as error:  # of base64, struct and int()
            raise ValueError(f"{text[:20]!r} holds no figures: {error}") from error


def add(parts: Iterable[Figures], scale: float = 1.0) -> Figures:
    """Return the figures of a tensor from the figures of its boxes, which do not overlap.

    Args:
        parts: The boxes' figures, at least one.
        scale: What to multiply each element by.
    """
    parts = list(parts)
    return Figures(
        scale * sum(part.total for part in parts),
        scale * scale * sum(part.square for part in parts),
        scale * min(part.low for part in parts),
        scale * max(part.high for part in parts),
        sum(part.odd for part in parts),
        tuple(scale * sum(column) for column in zip(*(part.sketch for part in parts), strict=True)),
        tuple(scale * sum(column) for column in zip(*(part.placed for part in parts), strict=True)),
    )


def distance(one: Figures, other: Figures) -> float:
    """Return an estimate of the norm of the difference of two tensors; `ERROR` is its standard error.

    The figures must come from whole tensors of equal shape, or from the same box.
    """
    if one.odd or other.odd:
        return 0.0 if one.odd == other.odd else math.inf
    difference = [a - b for a, b in zip(one.sketch, other.sketch, strict=True)]
    return math.sqrt(_dot(difference, difference) / BITS)


def cosine(one: Figures, other: Figures) -> float:
    """Return an estimate of the cosine of the angle between two tensors, 0 if one is zero."""
    size = math.sqrt(_dot(one.sketch, one.sketch) * _dot(other.sketch, other.sketch))
    return _dot(one.sketch, other.sketch) / size if size else 0.0


def factor(one: Figures, other: Figures) -> tuple[float, float]:
    """Return the number that, times ``one``, comes nearest to ``other``, and what is left, as a share of ``other``."""
    size, target = _dot(one.sketch, one.sketch), _dot(other.sketch, other.sketch)
    if not size or not target:
        return 0.0, 0.0 if not target else 1.0
    best = _dot(one.sketch, other.sketch) / size
    rest = [b - best * a for a, b in zip(one.sketch, other.sketch, strict=True)]
    return best, math.sqrt(_dot(rest, rest) / target)


def where(one: Figures, other: Figures) -> tuple[float, float]:
    """Return where along the first dimension a difference lies, from 0 to 1, and how far it spreads."""
    difference = [a - b for a, b in zip(one.sketch[-PLACED:], other.sketch[-PLACED:], strict=True)]
    placed = [a - b for a, b in zip(one.placed, other.placed, strict=True)]
    size = _dot(difference, difference)
    if not size:
        return 0.0, 0.0
    center = _dot(difference, placed) / size
    return center, math.sqrt(max(_dot(placed, placed) / size - center * center, 0.0))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    found: float = sum(map(mul, one, other), 0.0)
    return found
