"""Sketches tensors of a few thousand elements, each of which has signs of its own, many tensors at a time."""

from __future__ import annotations

import math

import torch

from mmfsdp.parity.buckets import indices, keep, signs_of
from mmfsdp.parity.geometries import SMALL, Geometry

__all__ = ["SmallTensors"]


class SmallTensors:
    """Sketches of small boxes; those of the same geometry are finished together."""

    def __init__(self) -> None:
        self._held: dict[Geometry, tuple[list[int], list[torch.Tensor]]] = {}

    def add(self, places: list[int], values: list[torch.Tensor], geometry: Geometry) -> None:
        """Take the same box of some tensors, which may change afterwards.

        Args:
            places: The rows of their figures.
            values: Their elements, real numbers that need no gradient.
            geometry: Their geometry.
        """
        known, held = self._held.setdefault(geometry, ([], []))
        known.extend(places)
        held.append(torch.stack(values).reshape(len(values), -1))

    def take(self) -> list[tuple[list[int], torch.Tensor]]:
        """Return places and the rows of their figures, which are on the tensors' devices."""
        return [(places, _figures(torch.cat(held), geometry)) for geometry, (places, held) in self._held.items()]

    def clear(self) -> None:
        """Forget all boxes."""
        self._held.clear()


def _figures(given: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return the figures of the same box of several tensors, a row of elements each."""
    values = given.to(torch.float64)
    if values.shape[1] == 0:
        head = values.new_tensor([[0, 0, math.inf, -math.inf, 0]]).expand(len(values), -1)
    else:
        squares = values.square().sum(1)
        if values.device.type == "cpu" and squares.sum().item() < math.inf:
            odd = torch.zeros_like(squares)
        else:
            odd = values.mul(0).isnan().sum(1)  # 0 times infinity is NaN
        head = torch.stack([values.sum(1), squares, values.amin(1), values.amax(1), odd], 1)
    return torch.cat([head, values @ _signs(geometry)], 1)


def _signs(geometry: Geometry) -> torch.Tensor:
    """Return the signs of each element of a box, in two sets; and those of the second times the elements' places."""

    def make() -> tuple[torch.Tensor, int]:
        device, axes = geometry.device, zip(geometry.offsets, geometry.sizes, geometry.shape, strict=True)
        numbers = indices(tuple(axes), device)
        first, second = signs_of(device, torch.float64).view(2, SMALL, -1)[:, numbers]
        places = (numbers[:, None] + 0.5) / max(math.prod(geometry.shape), 1)
        return (made := torch.cat([first, second, second * places], 1)), made.nbytes

    return keep(geometry, make)
