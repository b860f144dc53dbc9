"""Plans the two messages of a bucket: shards to the owners of matrices, and updates back to shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmfsdp.optimizers.matrices import Matrix, Span, overlap
from mmfsdp.optimizers.shards import TensorDivision

__all__ = ["MatrixPiece", "Route", "route_of"]


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """A part of a matrix in a message, perhaps an empty one."""

    index: int
    """Index of the matrix in the bucket."""
    span: Span
    """Elements of the sender's or receiver's flattened shard, or, in a matrix that this rank owns, of the matrix."""

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return self.span[1] - self.span[0]


MatrixPieces = list[list[MatrixPiece]]
"""What a rank exchanges in one message: the pieces for or from each rank, in row-major order of the mesh."""


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's messages of a bucket."""

    given: MatrixPieces
    """Sent to each owner: spans of this rank's shards."""
    collected: MatrixPieces
    """Received from each rank: spans of the matrices that this rank owns, in the same order from every rank. Those of
    ranks of another replica are empty."""
    answered: MatrixPieces
    """Sent to each rank from this rank's matrices: spans of the updates, in the order of `collected`."""
    returned: MatrixPieces
    """Received from each owner: spans of this rank's shards."""

    @property
    def owned(self) -> list[int]:
        """Indices of the matrices that this rank owns."""
        return [piece.index for piece in self.collected[0]]


def route_of(
    matrices: Sequence[Matrix], owners: Sequence[int], divisions: Sequence[TensorDivision], rank: int, ranks: int
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
    for index, (matrix, owner, division) in enumerate(zip(matrices, owners, divisions, strict=True)):
        held = division.span(rank)
        mine = overlap(held, matrix.span)
        piece = MatrixPiece(index, (mine[0] - held[0], mine[1] - held[0]))
        sources = division.sources(owner)
        given[owner].append(piece if rank in sources else MatrixPiece(index, (0, 0)))
        returned[owner].append(piece)
        if owner == rank:
            for other, wanted in enumerate(_parts(index, matrix, division, ranks)):
                collected[other].append(wanted if other in sources else MatrixPiece(index, (0, 0)))
                answered[other].append(wanted)
    return Route(given, collected, answered, returned)


def _parts(index: int, matrix: Matrix, division: TensorDivision, ranks: int) -> Iterator[MatrixPiece]:
    """Yield the part of a matrix that each rank holds."""
    for rank in range(ranks):
        start, end = overlap(division.span(rank), matrix.span)
        yield MatrixPiece(index, (start - matrix.start, end - matrix.start))


def _per_rank(ranks: int) -> MatrixPieces:
    return [[] for _ in range(ranks)]
