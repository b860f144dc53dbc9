"""Refuses methods that would replace parameters of a sharded model by others of another size."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn

from mmfsdp.errors import ShardStateError

__all__ = ["refuse_resizing"]

_METHOD = "resize_token_embeddings"


def refuse_resizing(model: nn.Module) -> None:
    """Make ``resize_token_embeddings(n)`` of a Transformers model raise. Not collective.

    It computes with weights of which each rank has a shard, and registers whole ones, which no rank reduces.

    Args:
        model: The sharded root; without such a method nothing is done.
    """
    original = getattr(model, _METHOD, None)
    if not callable(original):
        return

    @functools.wraps(original)
    def resize(new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if new_num_tokens is None:  # asks for the embeddings
            return original(new_num_tokens, *args, **kwargs)
        raise ShardStateError(
            f"{_METHOD}({new_num_tokens}) was called on a sharded {type(model).__name__}, whose embeddings are "
            "divided over ranks. Call it before mmfsdp.shard(), then shard the model and build the optimizer."
        )

    setattr(model, _METHOD, resize)
