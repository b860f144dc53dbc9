"""Loads whole values into FSDP1's flat parameters: each rank writes the elements it holds, and nothing is gathered."""

from __future__ import annotations

from typing import Any

import torch

from mmfsdp.runtime.dtensors import Box
from mmfsdp.runtime.fsdp1.flat_params import FlatPiece
from mmfsdp.state.lazy_tensors import LazyTensor

__all__ = ["fill_piece", "piece_box"]


def piece_box(piece: FlatPiece) -> Box:
    """Return the rows of the parameter that hold this rank's elements; no rows if it has none. Not collective."""
    count, start = piece.target.numel(), piece.start
    if not piece.shape:
        return Box((), ())
    row = piece.shape[1:].numel()
    first, last = (start // row, (start + count - 1) // row) if count else (0, -1)
    return Box((first, *[0] * (len(piece.shape) - 1)), (last - first + 1, *piece.shape[1:]))


@torch.no_grad()
def fill_piece(piece: FlatPiece, value: Any) -> None:
    """Copy this rank's elements of a whole value. Not collective.

    Args:
        piece: The elements to write.
        value: A whole tensor, or a `LazyTensor`, from which only the needed rows are read.
    """
    count = piece.target.numel()
    if not count:
        return
    start = piece.start
    if isinstance(value, LazyTensor) and piece.shape:
        box = piece_box(piece)
        elements = value.read(box).flatten()
        start -= box.offsets[0] * piece.shape[1:].numel()
    else:
        elements = (value.read() if isinstance(value, LazyTensor) else value).reshape(-1)
    piece.target.copy_(elements[start : start + count])
