"""Sends the pieces of a bucket in one message to each rank, and takes received messages apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.optimizers.routes import Piece

__all__ = ["Message", "joined"]


class Message:
    """Pieces under way from every rank to every rank. Making one is collective: every rank of the group, in one order.

    Args:
        group: The ranks; None if there is only this one.
        sent: What this rank sends to each rank.
        received: What it receives from each.
        value_of: Returns the head of a piece that is sent, and its flattened elements.
        dtype: Dtype of the message.
        device: Where the message is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sent: Sequence[Sequence[Piece]],
        received: Sequence[Sequence[Piece]],
        value_of: Callable[[Piece], tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._received = received
        parts = [part for pieces in sent for piece in pieces for part in value_of(piece)]
        given = joined(parts, dtype, device)
        self._sizes = [sum(piece.numel for piece in pieces) for pieces in received]
        self._work: dist.Work | None = None
        if group is None:
            self._buffer = given
            return
        self._buffer = torch.empty(sum(self._sizes), dtype=dtype, device=device)
        self._given = given  # until it has been sent
        splits = [sum(piece.numel for piece in pieces) for pieces in sent]
        with Waiting("exchanging parts of matrices between their owners"):
            self._work = dist.all_to_all_single(self._buffer, given, self._sizes, splits, group=group, async_op=True)

    def pieces(self) -> Iterator[tuple[int, Piece, torch.Tensor, torch.Tensor]]:
        """Wait for the message, and yield the sender, the piece, its head and its elements, by sender."""
        if self._work is not None:
            with Waiting("exchanging parts of matrices between their owners"):
                self._work.wait()
            self._work = None
            del self._given
        start = 0
        for sender, pieces in enumerate(self._received):
            for piece in pieces:
                yield sender, piece, self._buffer[start], self._buffer[start + 1 : start + piece.numel]
                start += piece.numel


def joined(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return flattened parts one after the other."""
    found = [part.reshape(-1).to(device=device, dtype=dtype) for part in parts]
    return torch.cat(found) if found else torch.empty(0, dtype=dtype, device=device)
