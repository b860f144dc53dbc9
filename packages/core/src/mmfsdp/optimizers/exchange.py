"""Sends the pieces of a bucket in one message to each rank, with a status element for each matrix."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.optimizers.routes import MatrixPiece, MatrixPieces

__all__ = ["AllToAll", "Parcel"]

_DOING = "exchanging parts of matrices between their owners"


class Parcel:
    """The memory of what one rank sends to all ranks in a message, or receives from them.

    For each rank it holds an element per piece, its head, which says how the sender stands to the matrix; then the
    elements of the pieces.

    Args:
        pieces: What this rank has for each rank, or each rank for it.
        dtype: Dtype of the message.
        device: Where the message is.
    """

    def __init__(self, pieces: MatrixPieces, dtype: torch.dtype, device: torch.device) -> None:
        self.pieces = pieces
        self.lengths = [len(own) + sum(piece.numel for piece in own) for own in pieces]
        """Elements for each rank."""
        self.memory = torch.empty(sum(self.lengths), dtype=dtype, device=device)

    def heads(self) -> list[torch.Tensor]:
        """Return the heads for each rank, in the order of its pieces."""
        starts = self.memory.split(self.lengths)
        return [start[: len(own)] for start, own in zip(starts, self.pieces, strict=True)]

    def head(self, rank: int, index: int) -> torch.Tensor:
        """Return the head for one rank of the matrix at an index, a tensor without dimensions."""
        number = next(number for number, piece in enumerate(self.pieces[rank]) if piece.index == index)
        return self.memory[sum(self.lengths[:rank]) + number]

    def parts(self) -> dict[int, list[tuple[MatrixPiece, torch.Tensor]]]:
        """Return the pieces of each matrix with their elements, by its index in the bucket and then by rank."""
        # One call divides all: a slice for each takes longer than to copy it.
        views = iter(self.memory.split([size for own in self.pieces for size in (len(own), *(p.numel for p in own))]))
        found: dict[int, list[tuple[MatrixPiece, torch.Tensor]]] = {}
        for own in self.pieces:
            next(views)
            for piece in own:
                found.setdefault(piece.index, []).append((piece, next(views)))
        return found


class AllToAll:
    """A parcel under way from every rank to every rank. Making one is collective: every rank, in one order.

    Args:
        group: The ranks; None if there is only this one.
        sent: What this rank sends.
        received: The pieces that it receives from each rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, sent: Parcel, received: MatrixPieces) -> None:
        self._work: dist.Work | None = None
        self._received = sent
        if group is not None:
            self._received = Parcel(received, sent.memory.dtype, sent.memory.device)
            self._sent = sent  # until it has arrived
            with Waiting(_DOING):
                self._work = dist.all_to_all_single(
                    self._received.memory, sent.memory, self._received.lengths, sent.lengths, group=group, async_op=True
                )

    def receive(self) -> Parcel:
        """Wait for the message, and hand over what came, once: its memory is free when the caller drops it."""
        if self._work is not None:
            with Waiting(_DOING):
                self._work.wait()
            self._work = None
            del self._sent
        received = self._received
        del self._received
        return received
