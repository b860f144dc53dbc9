"""Shard, train and checkpoint PyTorch models from a config: a validated config becomes a plan, the plan is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmfsdp._lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.checkpoint.load import load_checkpoint
    from mmfsdp.checkpoint.save import save_checkpoint
    from mmfsdp.config import ShardConfig
    from mmfsdp.planning import ShardPlan, plan
    from mmfsdp.scaling import GradScaler
    from mmfsdp.sharding import apply_plan, shard
    from mmfsdp.state.model import load_model_state_dict, model_state_dict
    from mmfsdp.state.optimizer import load_optim_state_dict, optim_state_dict
    from mmfsdp.training import clip_grad_norm_, full_params, no_sync
    from mmfsdp.wrapper import FullyShardedDataParallel

__version__ = "0.1.0"

__all__ = [
    "FullyShardedDataParallel",
    "GradScaler",
    "ShardConfig",
    "ShardPlan",
    "__version__",
    "apply_plan",
    "clip_grad_norm_",
    "full_params",
    "load_checkpoint",
    "load_model_state_dict",
    "load_optim_state_dict",
    "model_state_dict",
    "no_sync",
    "optim_state_dict",
    "plan",
    "save_checkpoint",
    "shard",
]

_WHERE = {
    "FullyShardedDataParallel": "mmfsdp.wrapper",
    "GradScaler": "mmfsdp.scaling",
    "ShardConfig": "mmfsdp.config",
    "ShardPlan": "mmfsdp.planning.schema",
    "plan": "mmfsdp.planning.resolve",
    **dict.fromkeys(("apply_plan", "shard"), "mmfsdp.sharding"),
    **dict.fromkeys(("clip_grad_norm_", "full_params", "no_sync"), "mmfsdp.training"),
    **dict.fromkeys(("load_model_state_dict", "model_state_dict"), "mmfsdp.state.model"),
    **dict.fromkeys(("load_optim_state_dict", "optim_state_dict"), "mmfsdp.state.optimizer"),
    "load_checkpoint": "mmfsdp.checkpoint.load",
    "save_checkpoint": "mmfsdp.checkpoint.save",
}


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name)
