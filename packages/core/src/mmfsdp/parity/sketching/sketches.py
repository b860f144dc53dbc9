"""Sketches of tensors: a few numbers that do not depend on sharding, and that add up over the boxes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from mmfsdp.parity.sketching.buckets import indices, keep, signs_of
from mmfsdp.parity.sketching.figures import BITS, FIRST, PLACED
from mmfsdp.parity.sketching.geometries import SMALL, Geometry, geometry_of, real
from mmfsdp.parity.sketching.large_tensors import LargeTensors

__all__ = ["Sketches", "sketch_of"]


def sketch_of(local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], *, leading: int = 1) -> torch.Tensor:
    """Return the figures of one box of a tensor, as a vector of float64 on the CPU. Not collective.

    Args:
        local: See `mmfsdp.parity.sketching.geometries.geometry_of`.
        offsets: See `mmfsdp.parity.sketching.geometries.geometry_of`.
        shape: See `mmfsdp.parity.sketching.geometries.geometry_of`.
        leading: See `mmfsdp.parity.sketching.geometries.geometry_of`.
    """
    sketches = Sketches()
    sketches.add(local, geometry_of(local, tuple(offsets), tuple(shape), leading=leading))
    return sketches.take()[0]


class Sketches:
    """Sketches of many tensors, which are finished together.

    The chunks of a tensor (`mmfsdp.parity.sketching.chunks`) are summed, each with a sign, in two sets of buckets: a
    hash chooses the bucket in the first set, and the position in the tensor chooses it in the second. Then the elements
    of all buckets are summed with random signs, 16 times in each set. A tensor is read once for each set, however many
    signs there are; and the sketches of its boxes add up to the sketch of the whole, however it is divided.
    """

    def __init__(self) -> None:
        self.count = 0
        """How many boxes were taken: the row of the next one."""
        self._small, self._large = _SmallTensors(), LargeTensors()
        self._scaled: list[tuple[int, int, float]] = []

    def add(self, local: torch.Tensor, geometry: Geometry) -> int:
        """Take one box of a tensor, which may change afterwards. Not collective.

        Args:
            local: The elements of the box, of any dtype.
            geometry: What `geometry_of` returned for it.

        Returns:
            The row in what `take` will return.
        """
        index = self.count
        self.count += 1
        value = real(local.detach() if local.requires_grad else local)
        if geometry.is_small:
            self._small.add([index], [value], geometry)
        else:
            self._large.add(index, value, geometry)
        return index

    def add_all(self, parts: Iterable[tuple[torch.Tensor, Geometry]]) -> range:
        """Take a box of each of some tensors, as `add` does, in less time if many are small.

        Large ones are read at once, and small ones when there are no more; they must not change until then.
        """
        first = index = self.count
        groups: dict[Geometry, tuple[list[int], list[torch.Tensor]]] = {}
        for local, geometry in parts:
            value = real(local.detach() if local.requires_grad else local)
            if geometry.is_small:
                group, values = groups.setdefault(geometry, ([], []))
                group.append(index)
                values.append(value)
            else:
                self._large.add(index, value, geometry)
            index += 1
        for geometry, (group, values) in groups.items():
            self._small.add(group, values, geometry)
        self.count = index
        return range(first, index)

    def add_scaled(self, row: int, factor: float) -> int:
        """Take the tensor of a row times a number, and return the row of that."""
        self._scaled.append((self.count, row, factor))
        self.count += 1
        return self.count - 1

    def square(self, row: int) -> float:
        """Return the sum of squares of a row's tensor, 0 if that is not known without waiting for a device."""
        return self._large.squares.get(row, 0.0)

    def take(self) -> torch.Tensor:
        """Return the figures of all boxes, and forget them.

        Returns:
            One row of float64 each, on the CPU, in the order of `mmfsdp.parity.sketching.figures.Figures`. A
            device is waited for once.
        """
        made = [*self._small.take(), *self._large.take()]
        found = torch.zeros(self.count, FIRST + BITS + PLACED, dtype=torch.float64)
        for device in {rows.device for _, rows in made}:
            here = [(boxes, rows) for boxes, rows in made if rows.device == device]
            found[[index for boxes, _ in here for index in boxes]] = torch.cat([rows for _, rows in here]).cpu()
        if self._scaled:
            boxes, rows, factors = zip(*self._scaled, strict=True)
            found[[*boxes]] = _scaled(found[[*rows]], torch.tensor(factors, dtype=torch.float64)[:, None])
        self.clear()
        return found

    def clear(self) -> None:
        """Forget all boxes."""
        self.count = 0
        self._small.clear()
        self._large.clear()
        self._scaled.clear()


def _scaled(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the figures of tensors with finite elements times a number each."""
    found = factors * rows
    found[:, 1:2] *= factors
    found[:, 2:4] = torch.where(factors > 0, found[:, 2:4], found[:, [3, 2]])
    return found


class _SmallTensors:
    """Sketches of small boxes; boxes of the same geometry are finished together."""

    def __init__(self) -> None:
        self._held: dict[Geometry, tuple[list[int], list[torch.Tensor]]] = {}

    def add(self, rows: list[int], values: list[torch.Tensor], geometry: Geometry) -> None:
        """Take the same box of some tensors, which may change afterwards.

        Args:
            rows: The rows of their figures.
            values: Their elements, real numbers that need no gradient.
            geometry: Their geometry.
        """
        known, held = self._held.setdefault(geometry, ([], []))
        known.extend(rows)
        held.append(torch.stack(values).reshape(len(values), -1))

    def take(self) -> list[tuple[list[int], torch.Tensor]]:
        """Return rows and their figures, which are on the tensors' devices."""
        return [(rows, _figures(torch.cat(held), geometry)) for geometry, (rows, held) in self._held.items()]

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
    """Return two sets of signs for the elements of a box, and the second set times their positions."""

    def make() -> tuple[torch.Tensor, int]:
        device, axes = geometry.device, zip(geometry.offsets, geometry.sizes, geometry.shape, strict=True)
        numbers = indices(tuple(axes), device)
        first, second = signs_of(device, torch.float64).view(2, SMALL, -1)[:, numbers]
        positions = (numbers[:, None] + 0.5) / max(math.prod(geometry.shape), 1)
        return (made := torch.cat([first, second, second * positions], 1)), made.nbytes

    return keep(geometry, make)
