"""Loading into FSDP1's flat parameters: each rank writes the elements that it holds, and nothing is gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from mmfsdp.basics.text import clean_fqn
from mmfsdp.runtime.dtensors import Box
from mmfsdp.runtime.sharded_model import ShardedModel
from mmfsdp.saving.stored import StoredTensor

__all__ = ["FlatPiece", "fill_piece", "flat_pieces", "piece_box"]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """What this rank holds of one parameter: a run of its elements in row-major order, which sharding sees to."""

    target: torch.Tensor
    """Shape (n,), a view of the flat parameter's shard; n is 0 where other ranks hold all."""
    start: int
    """Where the run begins in the parameter."""
    shape: torch.Size
    """Of the whole parameter."""


def flat_pieces(state: ShardedModel) -> dict[str, FlatPiece]:
    """Return this rank's pieces by FQN, tied names too, for engine ``fsdp1``. Not collective; frees what is gathered.

    torch has no public function for where in the shard a parameter lies; its own load gathers every unit.
    """
    state.reshard()
    pieces: dict[str, FlatPiece] = {}
    for prefix, unit in state.module.named_modules():
        if not isinstance(unit, FullyShardedDataParallel) or unit._handle is None:
            continue
        flat: Any = unit._handle.flat_param
        shard = getattr(flat, "_local_shard", flat).detach()
        start = clean_fqn(f"{prefix}.") if prefix else ""
        for place, (fqn, where) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
            first, count = (where.offset_in_shard, where.numel_in_shard) if where.in_shard else (0, 0)
            pieces[start + fqn] = FlatPiece(
                shard[first : first + count],
                where.intra_param_start_idx if where.in_shard else 0,
                flat._shapes[place],
            )
        for name, _, module, first_name, _, first_module in flat._shared_param_infos:
            alias, known = (
                start + clean_fqn(".".join(part for part in pair if part))
                for pair in ((module, name), (first_module, first_name))
            )
            pieces[alias] = pieces[known]
    return pieces


def piece_box(piece: FlatPiece) -> Box:
    """Return the rows of the parameter in which this rank's elements lie; no rows if it has none. Not collective."""
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
        piece: Where to.
        value: A whole tensor, or a `StoredTensor`, of which only rows that are needed are read.
    """
    count = piece.target.numel()
    if not count:
        return
    start = piece.start
    if isinstance(value, StoredTensor) and piece.shape:
        box = piece_box(piece)
        elements = value.read(box).flatten()
        start -= box.offsets[0] * piece.shape[1:].numel()
    else:
        elements = (value.read() if isinstance(value, StoredTensor) else value).reshape(-1)
    piece.target.copy_(elements[start : start + count])
