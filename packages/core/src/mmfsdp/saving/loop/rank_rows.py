"""Keeps some bytes of every rank in one tensor; each rank writes and reads only its own row."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import gather_to_first, on_all_ranks
from mmfsdp.runtime.dtensors import Box
from mmfsdp.saving.writing.memory import bytes_of
from mmfsdp.state.lazy_tensors import LazyTensor, locate

__all__ = ["digest_of", "load_row", "own_row", "row_box", "rows_of_ranks"]

_HEAD = 8  # bytes of a row that say how many follow


def rows_of_ranks(own: bytes, mesh: DeviceMesh, scope: Scope, *, whole: bool) -> torch.Tensor:
    """Return the bytes of all ranks as one uint8 tensor of shape (ranks, bytes of the longest). Collective: every rank.

    Args:
        own: This rank's bytes.
        mesh: The ranks.
        scope: The same ranks, to exchange messages.
        whole: Return the whole tensor on the first rank, and no rows on the others; otherwise a DTensor.
    """
    data = len(own).to_bytes(_HEAD, "little") + own
    length = -scope.channel.lowest([-len(data)])[0]
    row = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8).unsqueeze(0)
    if whole:
        rows = gather_to_first(scope, row)
        return row[:0] if rows is None else torch.cat(rows)
    return DTensor.from_local(
        row.to(mesh.device_type),
        mesh,
        [Shard(0)] * mesh.ndim,
        run_check=False,
        shape=torch.Size((scope.size, length)),
        stride=(length, 1),
    )


def load_row(rows: LazyTensor | torch.Tensor, scope: Scope, *, has_head: bool = True) -> bytes:
    """Return the bytes of this rank from what `rows_of_ranks` saved; it reads no other row. Collective: every rank.

    Args:
        rows: What `rows_of_ranks` returned, as a checkpoint holds it: one row for each rank of the scope.
        scope: The ranks.
        has_head: Whether a row says how long it is. Those that earlier versions of the MMEngine adapter stored do not.

    Raises:
        CheckpointError: A rank cannot read its row; raised on every rank.
    """
    locate([(rows, row_box(rows, scope.rank))], scope)
    return on_all_ranks(lambda: own_row(rows, scope.rank, has_head=has_head), scope)


def row_box(rows: Any, place: int) -> Box:
    """Return the box of a rank's row in what `rows_of_ranks` saved."""
    return Box((place, 0), (1, rows.shape[1]))


def own_row(rows: LazyTensor | torch.Tensor, rank: int, *, has_head: bool = True) -> bytes:
    """Return the bytes of one rank. Not collective; `mmfsdp.state.lazy_tensors.locate` comes before it.

    Raises:
        CorruptCheckpointError: The data is damaged.
    """
    if isinstance(rows, DTensor):
        row = rows.to_local().cpu()
    elif isinstance(rows, torch.Tensor):
        row = rows[rank : rank + 1].cpu().contiguous()
    else:
        row = rows.read(row_box(rows, rank))
    data = bytes_of(row)
    if not has_head:
        return bytes(data)
    return bytes(data[_HEAD:][: int.from_bytes(data[:_HEAD], "little")])


def digest_of(state: Any) -> str:
    """Return a text that is equal for equal states of nested tensors and values, and differs for others."""

    def described(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            data = bytes_of(leaf.detach().cpu().contiguous())
            return leaf.dtype, tuple(leaf.shape), hashlib.sha256(data).hexdigest()
        if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes"):
            return str(leaf.dtype), leaf.shape, hashlib.sha256(leaf.tobytes()).hexdigest()
        return repr(leaf)

    return repr(map_leaves(state, described))
