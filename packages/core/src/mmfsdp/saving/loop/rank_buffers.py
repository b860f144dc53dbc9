"""Saves and restores the buffers of each rank, such as running statistics, where they differ between ranks."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import all_equal, on_all_ranks
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.loop.rank_rows import digest_of, load_row, rows_of_ranks
from mmfsdp.saving.reading.content import restricted_load

__all__ = ["buffers_of_ranks", "load_buffers_of_ranks", "restore_buffers"]


def buffers_of_ranks(model: nn.Module, scope: Scope, *, whole: bool) -> torch.Tensor | None:
    """Return the persistent buffers of all ranks, a row of bytes each; None if all ranks have the same.

    Collective: every rank.

    Args:
        model: A sharded model.
        scope: Its ranks.
        whole: See `mmfsdp.saving.loop.rank_rows.rows_of_ranks`.
    """
    own = _persistent_buffers(model) if scope.size > 1 else {}
    if not own or all_equal(scope, digest_of(own)):
        return None
    file = io.BytesIO()
    torch.save({name: buffer.cpu() for name, buffer in own.items()}, file)
    return rows_of_ranks(file.getvalue(), find_sharded_model(model).mesh, scope, whole=whole)


def load_buffers_of_ranks(model: nn.Module, rows: Any, scope: Scope) -> None:
    """Give each rank the buffers that it saved. Collective: every rank, as many as saved them.

    Args:
        model: A sharded model.
        rows: What `buffers_of_ranks` returned, as a checkpoint holds it.
        scope: The ranks of the model.

    Raises:
        CheckpointError: A rank cannot read its part; raised on every rank.
    """
    own = load_row(rows, scope)
    on_all_ranks(lambda: restore_buffers(model, own), scope)


def restore_buffers(model: nn.Module, own: bytes) -> None:
    """Give the buffers of this rank the values that it saved. Not collective.

    Args:
        model: A sharded model.
        own: This rank's row of what `buffers_of_ranks` returned.
    """
    saved = restricted_load(io.BytesIO(own), "The buffers of this rank", ())
    for name, buffer in _persistent_buffers(model).items():
        if name in saved:
            buffer.copy_(saved[name])


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return by FQN the buffers that a checkpoint of a model holds, with the values of this rank."""
    state = find_sharded_model(model)
    saved = {buffer.fqn for buffer in state.plan.buffers if buffer.persistent}
    named = {clean_fqn(name): buffer for name, buffer in state.module.named_buffers()}
    return {name: buffer.detach() for name, buffer in named.items() if name in saved}
