"""Finds the box of a tensor that a rank holds, by one rule, and tests whether boxes overlap. It needs no torch."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from mmfsdp.errors import ConfigError

__all__ = [
    "Bounds",
    "Boxes",
    "EvenBoxes",
    "ListedBoxes",
    "Placements",
    "Ranks",
    "boxes_meeting",
    "division_order",
    "is_within",
    "meet",
    "rows_per_rank",
    "sharded_box",
]

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and sizes of a box in a tensor, in elements, one per dimension."""

_MOST_RANKS = 65_536

Placements = Sequence[int | None]
"""For each mesh dimension, the tensor dimension that it shards, or None if it replicates."""


def sharded_box(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Placements,
    coordinates: Sequence[int],
    order: Sequence[int] = (),
) -> Bounds:
    """Return the box that one rank of a mesh holds of a tensor.

    A dimension of ``d`` elements over ``n`` ranks gives rank ``r`` the elements from ``r * ceil(d / n)`` on, at most
    ``ceil(d / n)`` of them. A dimension that several mesh dimensions shard is divided by one after the other.

    Args:
        shape: Shape of the whole tensor, in elements.
        mesh: Number of ranks per mesh dimension.
        placements: The tensor dimension that each mesh dimension shards, or None if it replicates.
        coordinates: The rank's coordinates, one per mesh dimension.
        order: The mesh dimensions in the order in which they divide. Default: from the first to the last.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    divided = [*zip(placements, mesh, coordinates, strict=True)]
    for dim, parts, coordinate in (divided[at] for at in order) if order else divided:
        if dim is None:
            continue
        chunk = rows_per_rank(sizes[dim], parts)
        start = min(chunk * coordinate, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def division_order(placements: Placements, factors: Sequence[Any], mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the mesh dimensions in the order in which they divide a DTensor; empty if from the first to the last.

    A dimension with a split factor of ``n`` divides what later mesh dimensions have divided into ``n`` parts, as
    ``fully_shard`` does after tensor parallelism (``_StridedShard`` in torch/distributed/tensor/placement_types.py).

    Args:
        placements: The tensor dimension that each mesh dimension shards, or None if it replicates.
        factors: The split factor of each mesh dimension; 1 of those that have none.
        mesh: Number of ranks per mesh dimension.

    Raises:
        ValueError: No later mesh dimensions make as many parts as a split factor says.
    """
    order: list[int] = []
    for at in reversed(range(len(mesh))):
        parts, index = 1, 0
        while parts != factors[at] and index < len(order):
            parts *= mesh[order[index]] if placements[order[index]] == placements[at] else 1
            index += 1
        if parts != factors[at]:
            raise ValueError(f"split factor {factors[at]!r}, and no later dimensions of its mesh have that many ranks")
        order.insert(index, at)
    return () if order == sorted(order) else tuple(order)


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return ``ceil(rows / ranks)``: the rows that each rank holds of a dimension, until none are left."""
    return -(-rows // ranks)


def boxes_meeting(
    box: Bounds, shape: Sequence[int], mesh: Sequence[int], placements: Placements, order: Sequence[int] = ()
) -> Iterator[tuple[tuple[int | None, ...], Bounds]]:
    """Yield the ranks' boxes that overlap a box, each with its ranks' coordinates (None in dimensions that replicate).

    The work grows with the number of overlapping boxes, not with the number of ranks.

    Args:
        box: The box; nothing is yielded if it is empty.
        shape: Shape of the whole tensor, in elements.
        mesh: Number of ranks per mesh dimension.
        placements: The tensor dimension that each mesh dimension shards, or None if it replicates.
        order: The mesh dimensions in the order in which they divide. Default: from the first to the last.
    """
    if 0 in box[1]:
        return
    whole: Bounds = (0,) * len(shape), tuple(shape)
    found: list[tuple[tuple[int | None, ...], Bounds]] = [((None,) * len(mesh), whole)]
    for at in order or range(len(mesh)):
        if (dim := placements[at]) is not None:
            found = [
                ((*coordinates[:at], part, *coordinates[at + 1 :]), _nth(held, dim, mesh[at], part))
                for coordinates, held in found
                for part in _meeting_parts(box, held, dim, mesh[at])
            ]
    yield from found


def meet(one: Bounds, other: Bounds) -> bool:
    """Return whether two boxes of one tensor share an element; boxes without dimensions do."""
    return all(
        max(start, begin) < min(start + size, begin + extent)
        for start, size, begin, extent in zip(*one, *other, strict=True)
    )


def is_within(one: Bounds, other: Bounds) -> bool:
    """Return whether one box lies entirely within the other."""
    return all(
        begin <= start and start + size <= begin + extent
        for start, size, begin, extent in zip(*one, *other, strict=True)
    )


def _nth(held: Bounds, dim: int, parts: int, coordinate: int) -> Bounds:
    offsets, sizes = sharded_box(held[1], [parts], [dim], [coordinate])
    return tuple(map(sum, itertools.zip_longest(held[0], offsets))), sizes


def _meeting_parts(box: Bounds, held: Bounds, dim: int, parts: int) -> range:
    chunk = rows_per_rank(held[1][dim], parts)
    if chunk == 0:
        return range(0)
    first = max(box[0][dim] - held[0][dim], 0)
    last = min(box[0][dim] + box[1][dim] - held[0][dim], held[1][dim]) - 1
    return range(first // chunk, last // chunk + 1) if last >= first else range(0)


class Boxes(Protocol):
    """The boxes that a tensor is stored in, and for each where to look for it."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def exact(self) -> bool:
        """Whether they cover the tensor without gap or overlap by the rule that makes them."""
        ...

    def meeting(self, box: Bounds | None) -> Mapping[Bounds, Any]:
        """Return those that share an element with ``box``, or all of them."""
        ...


@dataclass(frozen=True)
class ListedBoxes:
    """Boxes that are listed one by one."""

    listed: Mapping[Bounds, Any]
    """Each box, not empty, and where to look for it."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.listed)

    @property
    def exact(self) -> bool:
        """Whether they surely cover the tensor without gap or overlap. No rule guarantees it."""
        return False

    def meeting(self, box: Bounds | None) -> Mapping[Bounds, Any]:
        """Return those that share an element with ``box``, or all of them."""
        if box is None or not box[0]:
            return self.listed
        # Only rows decide which ones to look at: ranks mostly hold rows.
        first, tallest = self._rows
        begin = bisect_right(first, box[0][0] - tallest)
        end = bisect_left(first, box[0][0] + box[1][0])
        return {held: self.listed[held] for held in self._sorted[begin:end] if meet(held, box)}

    @cached_property
    def _sorted(self) -> list[Bounds]:
        return sorted(self.listed)

    @cached_property
    def _rows(self) -> tuple[list[int], int]:
        return [offsets[0] for offsets, _ in self._sorted], max((sizes[0] for _, sizes in self._sorted), default=0)

    def __getstate__(self) -> dict[str, Any]:
        return {"listed": dict(self.listed)}


@dataclass(frozen=True)
class EvenBoxes:
    """Boxes by the rule of `sharded_box`, each with the rank that wrote it."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, in elements."""
    mesh: tuple[int, ...]
    """Ranks per mesh dimension."""
    placements: tuple[int | None, ...]
    """The tensor dimension that each mesh dimension shards, or None where it replicates."""
    replica: int
    """Which of the ranks that hold the same box wrote it, counted over the mesh dimensions that replicate."""
    order: tuple[int, ...] = ()
    """The mesh dimensions in the order in which they divide; empty if from the first to the last."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.meeting(None))

    @property
    def exact(self) -> bool:
        """Whether they cover the tensor without gap or overlap. They always do."""
        return True

    def meeting(self, box: Bounds | None) -> Mapping[Bounds, int]:
        """Return those that share an element with ``box``, or all of them."""
        whole = (0,) * len(self.shape), self.shape
        found = boxes_meeting(whole if box is None else box, self.shape, self.mesh, self.placements, self.order)
        return {held: self._writer(coordinates) for coordinates, held in found}

    @property
    def is_valid(self) -> bool:
        """Whether mesh, placements and order fit each other, which is to be asked of what a file says."""
        dims, ranks = len(self.shape), len(self.mesh)
        return (
            len(self.placements) == ranks
            and all(dim is None or (type(dim) is int and 0 <= dim < dims) for dim in self.placements)
            and all(type(at) is int for at in self.order)
            and (not self.order or sorted(self.order) == [*range(ranks)])
            and type(self.replica) is int
            and 0 <= self.replica < self.replicas
        )

    @property
    def replicas(self) -> int:
        """How many ranks hold each box."""
        return math.prod(size for size, dim in zip(self.mesh, self.placements, strict=True) if dim is None)

    def held_by(self, rank: int) -> Bounds:
        """Return the box that a rank holds, written by it or by another one."""
        return sharded_box(self.shape, self.mesh, self.placements, self._coordinates(rank), self.order)

    def is_written_by(self, rank: int) -> bool:
        """Tell whether a rank writes the box that it holds."""
        coordinates, replica = self._coordinates(rank), 0
        for size, coordinate, dim in zip(self.mesh, coordinates, self.placements, strict=True):
            if dim is None:
                replica = replica * size + coordinate
        return replica == self.replica

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        coordinates: list[int] = []
        for size in reversed(self.mesh):
            rank, coordinate = divmod(rank, size)
            coordinates.insert(0, coordinate)
        return tuple(coordinates)

    def _writer(self, coordinates: tuple[int | None, ...]) -> int:
        replica, rank, full = self.replica, 0, []
        for size, coordinate in zip(reversed(self.mesh), reversed(coordinates), strict=True):
            if coordinate is None:
                replica, coordinate = divmod(replica, size)
            full.append(coordinate)
        for size, coordinate in zip(self.mesh, reversed(full), strict=True):
            rank = rank * size + coordinate
        return rank


@dataclass(frozen=True, slots=True)
class Ranks:
    """A mesh of ranks, by its two sizes: (replicate, shard), as hybrid sharding uses."""

    replicas: int
    """Groups of ranks that each hold everything."""
    shards: int
    """Ranks in a group; they divide every tensor's rows."""

    @classmethod
    def parse(cls, given: int | str) -> Ranks:
        """Return the mesh that ``8`` or ``'2x4'`` (two replicas of four shards) stands for.

        Raises:
            ConfigError: It is neither.
        """
        match = re.fullmatch(r"(?:(\d{1,7})x)?(\d{1,7})", str(given).strip())
        replicas, shards = (int(match[1] or 1), int(match[2])) if match else (0, 0)
        if not 1 <= replicas * shards <= _MOST_RANKS:
            raise ConfigError(
                f"{given!r} is not a number of ranks. Write a number from 1 to {_MOST_RANKS}, or text such as '2x4' "
                "for two replicas of four shards."
            )
        return cls(replicas, shards)

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards

    def shard(self, rank: int) -> int:
        """Return which part of every tensor a rank holds."""
        return rank % self.shards
