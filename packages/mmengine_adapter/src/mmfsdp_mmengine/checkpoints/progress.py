"""Stores the random number states of all ranks in a checkpoint, and reads this rank's back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

from mmfsdp.collective import gather_objects, place_in, scope_of
from mmfsdp.runtime import find_sharded_model
from mmfsdp.state import whole_value

__all__ = ["own_random_state", "random_states"]


def random_states(model: nn.Module, state: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """Return the random states of all ranks, one row per rank in the order of the mesh. Collective: every rank.

    Args:
        model: The sharded model, whose mesh lists the ranks.
        state: This rank's state, see `mmfsdp_mmengine.checkpoints.randomness.random_state`.
        whole: Return the whole ``(ranks, bytes)`` table of uint8; otherwise a DTensor, whose rows are the ranks' own.
    """
    mesh = find_sharded_model(model).mesh
    if whole:
        return torch.stack(gather_objects(scope_of(mesh), state))
    row = state.unsqueeze(0).to(mesh.device_type)
    shape = torch.Size((mesh.size(), state.numel()))
    return DTensor.from_local(
        row, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=(state.numel(), 1)
    )


def own_random_state(model: nn.Module, progress: Mapping[str, Any]) -> torch.Tensor | None:
    """Return this rank's row of a saved table, or None if the mesh had another size. Not collective."""
    mesh = find_sharded_model(model).mesh
    table = progress.get("random_states")
    if table is None or table.shape[0] != mesh.size():
        return None
    row: torch.Tensor = whole_value(table)[place_in(mesh)]
    return row
