"""A sharded model while it trains: its state, hooks, guards, gradients, buffers and clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy
from mmfsdp.basics.torch_version import require_torch

if TYPE_CHECKING:
    from mmfsdp.runtime.buffers import keep_buffers_alike
    from mmfsdp.runtime.clipping import check_finite_norm
    from mmfsdp.runtime.reachability import LossReach
    from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model

require_torch(__name__)

__all__ = [
    "LossReach",
    "ShardedModel",
    "check_finite_norm",
    "find_sharded_model",
    "keep_buffers_alike",
]

_WHERE = {
    "check_finite_norm": "mmfsdp.runtime.clipping",
    "keep_buffers_alike": "mmfsdp.runtime.buffers",
    "LossReach": "mmfsdp.runtime.reachability",
    **dict.fromkeys(("ShardedModel", "find_sharded_model"), "mmfsdp.runtime.sharded_model"),
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
