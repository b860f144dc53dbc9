"""The rule for which box of a tensor a rank holds, and boxes that meet. Without torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmfsdp.errors import ConfigError

__all__ = ["Bounds", "Placements", "Ranks", "boxes_meeting", "is_within", "meet", "rows_per_rank", "sharded_box"]

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box in a tensor, in elements, one of each per dimension."""

_MOST_RANKS = 65_536

Placements = Sequence[int | None]
"""Per mesh dimension the tensor dimension that it shards, or None where it replicates."""


def sharded_box(
    shape: Sequence[int], mesh: Sequence[int], placements: Placements, coordinates: Sequence[int]
) -> Bounds:
    """Return the box that one rank of a mesh holds of a tensor.

    A dimension of ``d`` elements over ``n`` ranks gives rank ``r`` the elements from ``r * ceil(d / n)`` on, at most
    ``ceil(d / n)`` of them. A dimension that several mesh dimensions shard is divided by the first one first.

    Args:
        shape: Of the whole tensor, in elements.
        mesh: Ranks per mesh dimension.
        placements: How each mesh dimension places the tensor.
        coordinates: The rank's, one per mesh dimension.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, parts, place in zip(placements, mesh, coordinates, strict=True):
        if dim is None:
            continue
        chunk = rows_per_rank(sizes[dim], parts)
        start = min(chunk * place, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return ``ceil(rows / ranks)``: the rows that each rank holds of a dimension, until none are left."""
    return -(-rows // ranks)


def boxes_meeting(
    box: Bounds, shape: Sequence[int], mesh: Sequence[int], placements: Placements
) -> Iterator[tuple[tuple[int | None, ...], Bounds]]:
    """Yield what ranks hold of a box: coordinates (None in dimensions that replicate), and all of their box.

    The work does not grow with the number of ranks, only with that of the boxes that meet.

    Args:
        box: The box; nothing is yielded if it is empty.
        shape: Of the whole tensor, in elements.
        mesh: Ranks per mesh dimension.
        placements: How each mesh dimension places the tensor.
    """
    if 0 in box[1]:
        return
    found: list[tuple[tuple[int | None, ...], Bounds]] = [((), ((0,) * len(shape), tuple(shape)))]
    for dim, parts in zip(placements, mesh, strict=True):
        if dim is None:
            found = [((*coordinates, None), held) for coordinates, held in found]
            continue
        found = [
            ((*coordinates, place), _nth(held, dim, parts, place))
            for coordinates, held in found
            for place in _places(box, held, dim, parts)
        ]
    yield from found


def meet(one: Bounds, other: Bounds) -> bool:
    """Tell whether two boxes of one tensor share an element. Boxes without dimensions do."""
    return all(
        max(start, begin) < min(start + size, begin + extent)
        for start, size, begin, extent in zip(*one, *other, strict=True)
    )


def is_within(one: Bounds, other: Bounds) -> bool:
    """Tell whether all of one box lies in the other."""
    return all(
        begin <= start and start + size <= begin + extent
        for start, size, begin, extent in zip(*one, *other, strict=True)
    )


def _nth(held: Bounds, dim: int, parts: int, place: int) -> Bounds:
    offsets, sizes = sharded_box(held[1], [parts], [dim], [place])
    return tuple(map(sum, itertools.zip_longest(held[0], offsets))), sizes


def _places(box: Bounds, held: Bounds, dim: int, parts: int) -> range:
    chunk = rows_per_rank(held[1][dim], parts)
    if chunk == 0:
        return range(0)
    first = max(box[0][dim] - held[0][dim], 0)
    last = min(box[0][dim] + box[1][dim] - held[0][dim], held[1][dim]) - 1
    return range(first // chunk, last // chunk + 1) if last >= first else range(0)


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
