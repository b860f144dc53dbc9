"""Plans the two messages of a bucket: shards to the owners of matrices, and updates back to shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmfsdp.optimizers.matrices import Matrix, Span, overlap
from mmfsdp.optimizers.shards import Division

__all__ = ["Piece", "Route", "route_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a matrix in a message. In front of it, one element says how its sender stands to the matrix."""

    place: int
    """The matrix's place in the bucket."""
    span: Span
    """Elements of the sender's or receiver's flattened shard, or, in a matrix that this rank owns, of the matrix."""

    @property
    def numel(self) -> int:
        """Elements of the message: the part and the one in front of it."""
        return self.span[1] - self.span[0] + 1


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's messages of a bucket; each list has an item per rank, in row-major order of the mesh."""

    given: list[list[Piece]]
    """Sent to each owner: spans of this rank's shards."""
    collected: list[list[Piece]]
    """Received from each rank for this rank's matrices: spans of the matrices."""
    answered: list[list[Piece]]
    """Sent to each rank from this rank's matrices: spans of the updates."""
    returned: list[list[Piece]]
    """Received from each owner: spans of this rank's shards."""


def route_of(
    matrices: Sequence[Matrix], owners: Sequence[int], divisions: Sequence[Division], rank: int, ranks: int
) -> Route:
    """Return what one rank exchanges for a bucket. Linear in its matrices, and in the ranks for those it owns.

    Args:
        matrices: The matrices of the bucket.
        owners: The owner of each.
        divisions: How the parameter of each is divided.
        rank: This rank.
        ranks: Number of ranks.
    """
    given, collected, answered, returned = (_per_rank(ranks) for _ in range(4))
    route = Route(given, collected, answered, returned)
    for place, (matrix, owner, division) in enumerate(zip(matrices, owners, divisions, strict=True)):
        held = division.span(rank)
        mine = overlap(held, matrix.span)
        piece = Piece(place, (mine[0] - held[0], mine[1] - held[0]))
        sources = division.sources(owner)
        if rank in sources:
            route.given[owner].append(piece)
        route.returned[owner].append(piece)
        if owner != rank:
            continue
        for other in range(ranks):
            part = overlap(division.span(other), matrix.span)
            wanted = Piece(place, (part[0] - matrix.start, part[1] - matrix.start))
            if other in sources:
                route.collected[other].append(wanted)
            route.answered[other].append(wanted)
    return route


def _per_rank(ranks: int) -> list[list[Piece]]:
    return [[] for _ in range(ranks)]
