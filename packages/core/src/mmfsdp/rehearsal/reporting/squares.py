"""Lays out sizes as rectangles whose areas are proportional to them: a squarified treemap. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Box", "squarified"]

Box = tuple[float, float, float, float]
"""Left, top, width and height."""


def squarified(sizes: Sequence[float], width: float, height: float) -> list[Box]:
    """Return a box for each size; together they fill the rectangle.

    The boxes are as square as rows along the shorter side make them (Bruls, Huizing, van Wijk, "Squarified Treemaps",
    2000).

    Args:
        sizes: Positive sizes, the largest first.
        width: The width of the rectangle.
        height: Its height.
    """
    scale = width * height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    boxes: list[Box] = []
    left = top = 0.0
    while len(boxes) < len(areas):
        first = len(boxes)
        side = min(width, height)
        count = 1
        while first + count < len(areas) and _worst(areas[first : first + count + 1], side) <= _worst(
            areas[first : first + count], side
        ):
            count += 1
        row = areas[first : first + count]
        depth = sum(row) / side if side else 0.0
        along = 0.0
        for area in row:
            length = area / depth if depth else 0.0
            if width <= height:
                boxes.append((left + along, top, length, depth))
            else:
                boxes.append((left, top + along, depth, length))
            along += length
        if width <= height:
            top, height = top + depth, max(height - depth, 0.0)
        else:
            left, width = left + depth, max(width - depth, 0.0)
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """Return the largest ratio of the sides of a row's boxes."""
    total = sum(row)
    if not total or not side:
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))
