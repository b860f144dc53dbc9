"""Says which ranks of DeepSpeed hold a parameter, and where in their flat tensors.

ZeRO stages 1 and 2 lay the parameters of a group end to end and give each rank an equal stretch of that. Stage 3 gives
each rank ``ceil(n / ranks)`` elements of every parameter, and lays what one rank has of them end to end, in one flat
tensor per sub-group (deepspeed/utils/zero_to_fp32.py; runtime/zero/stage_1_and_2.py, stage3.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmfsdp.basics.boxes import Bounds, meet, rows_per_rank
from mmfsdp.checkpoint.formats.fsdp1.flat_parameters import flat_boxes

__all__ = ["PartitionPiece", "PieceBoxes", "Shapes", "boxes_of", "by_parameter", "by_stretch", "even_pieces"]

Shapes = Mapping[str, tuple[int, ...]]
"""The parameters of a flat tensor, in its order, and their shapes."""


@dataclass(frozen=True, slots=True)
class PartitionPiece:
    """Consecutive elements of a parameter in one rank's flat tensor."""

    rank: int
    """The rank."""
    flat: int
    """Index among its flat tensors."""
    at: int
    """The first element, counted from the start of the flat tensor."""
    start: int
    """The same, counted from the start of the parameter."""
    stop: int
    """Element of the parameter after the last."""


def by_stretch(flat: int, shapes: Shapes, stretch: int, paddings: Sequence[int]) -> dict[str, list[PartitionPiece]]:
    """Return where the parameters of a group are in stages 1 and 2.

    Args:
        flat: Number of the group.
        shapes: Its parameters.
        stretch: Elements that each rank holds of it; the last that holds any may have fewer.
        paddings: Elements between each parameter and the next.
    """
    found: dict[str, list[PartitionPiece]] = {}
    begin = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        found[name] = [
            PartitionPiece(
                rank, flat, start - rank * stretch, start - begin, min((rank + 1) * stretch, begin + numel) - begin
            )
            for rank in range(begin // max(stretch, 1), rows_per_rank(begin + numel, max(stretch, 1)))
            if (start := max(begin, rank * stretch)) < begin + numel
        ]
        begin += numel + padding
    return found


def by_parameter(groups: Sequence[Shapes], lengths: Sequence[int], ranks: int) -> dict[str, list[PartitionPiece]]:
    """Return where the parameters are in stage 3.

    Args:
        groups: The parameters of each sub-group.
        lengths: Elements of each rank's flat tensors. There may be more or fewer than groups.
        ranks: Number of ranks.
    """
    found: dict[str, list[PartitionPiece]] = {}
    flat = at = 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        numel = math.prod(shape)
        share = rows_per_rank(numel, ranks)
        parts = []  # of one rank's share: flat tensor, first element in it, and in the share
        done = 0
        while done < share and flat < len(lengths):
            if at == lengths[flat]:
                flat, at = flat + 1, 0
                continue
            count = min(share - done, lengths[flat] - at)
            parts.append((flat, at, done, count))
            at, done = at + count, done + count
        found[name] = [
            PartitionPiece(rank, index, first, start, min(start + count, numel))
            for rank in range(ranks)
            for index, first, begin, count in parts
            if (start := rank * share + begin) < numel
        ]
    return found


def even_pieces(numel: int, ranks: int) -> list[PartitionPiece]:
    """Return where a frozen parameter is in stage 3: each rank has its share of it in a tensor of its own."""
    share = rows_per_rank(numel, ranks)
    starts = [rank * share for rank in range(ranks)]
    return [
        PartitionPiece(rank, 0, 0, start, min(start + share, numel))
        for rank, start in enumerate(starts)
        if start < numel
    ]


def boxes_of(shape: tuple[int, ...], pieces: Sequence[PartitionPiece]) -> Iterator[tuple[Bounds, PartitionPiece, int]]:
    """Yield the boxes of a parameter, with the piece that holds each and the first element of it in the flat tensor."""
    for piece in pieces:
        for start, offsets, sizes in flat_boxes(shape, piece.start, piece.stop):
            yield (offsets, sizes), piece, piece.at + start - piece.start


@dataclass(frozen=True)
class PieceBoxes:
    """The boxes of a parameter, made on demand: with thousands of ranks there are millions."""

    shape: tuple[int, ...]
    """Shape of the parameter, in elements."""
    pieces: Sequence[PartitionPiece]
    """The pieces that hold it, in the order of its elements; each element is in one."""
    locate_box: Callable[[PartitionPiece, int], Any]
    """Returns where to look for a box that begins at an element of a piece's flat tensor."""

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(1 for _ in boxes_of(self.shape, self.pieces))

    @property
    def exact(self) -> bool:
        """Whether they cover the parameter without gap or overlap: its pieces follow each other."""
        return True

    def meeting(self, box: Bounds | None) -> dict[Bounds, Any]:
        """Return those that share an element with ``box``, or all of them."""
        pieces = self.pieces
        if box is not None and self.shape:
            row = math.prod(self.shape[1:])
            begin, end = box[0][0] * row, (box[0][0] + box[1][0]) * row
            first = bisect_right(pieces, begin, key=lambda piece: piece.stop)
            last = bisect_right(pieces, end - 1, key=lambda piece: piece.start)
            pieces = pieces[first:last]
        return {
            found: self.locate_box(piece, at)
            for found, piece, at in boxes_of(self.shape, pieces)
            if box is None or meet(found, box)
        }
