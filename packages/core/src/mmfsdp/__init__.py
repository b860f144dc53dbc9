"""Shard, train and checkpoint PyTorch models from a config: a validated config becomes a plan, the plan is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy

if TYPE_CHECKING:
    from mmfsdp.config import ShardConfig
    from mmfsdp.parity.comparing import compare
    from mmfsdp.parity.recorder import recording
    from mmfsdp.planning import ShardPlan, plan
    from mmfsdp.rehearsal import fit, rehearse
    from mmfsdp.runtime.scaling import GradScaler
    from mmfsdp.runtime.sharded_params import sharded_params
    from mmfsdp.runtime.training import clip_grad_norm_, no_sync
    from mmfsdp.runtime.whole_params import full_params
    from mmfsdp.saving.load import load_checkpoint
    from mmfsdp.saving.pretrained import load_pretrained
    from mmfsdp.saving.save import save_checkpoint
    from mmfsdp.sharding.apply import apply_plan, shard
    from mmfsdp.sharding.meta import parameters_on_meta
    from mmfsdp.state.model import load_model_state_dict, model_state_dict
    from mmfsdp.state.optimizer import load_optim_state_dict, optim_state_dict
    from mmfsdp.torch_style.wrapper import FullyShardedDataParallel

__version__ = "0.1.0"

__all__ = [
    "FullyShardedDataParallel",
    "GradScaler",
    "ShardConfig",
    "ShardPlan",
    "__version__",
    "apply_plan",
    "clip_grad_norm_",
    "compare",
    "fit",
    "full_params",
    "load_checkpoint",
    "load_model_state_dict",
    "load_optim_state_dict",
    "load_pretrained",
    "model_state_dict",
    "no_sync",
    "optim_state_dict",
    "parameters_on_meta",
    "plan",
    "recording",
    "rehearse",
    "save_checkpoint",
    "shard",
    "sharded_params",
]

_WHERE = {
    "FullyShardedDataParallel": "mmfsdp.torch_style.wrapper",
    "GradScaler": "mmfsdp.runtime.scaling",
    "ShardConfig": "mmfsdp.config",
    "ShardPlan": "mmfsdp.planning.schema",
    "plan": "mmfsdp.planning.resolve",
    "compare": "mmfsdp.parity.comparing",
    "recording": "mmfsdp.parity.recorder",
    "fit": "mmfsdp.rehearsal.fitting.fastest",
    "rehearse": "mmfsdp.rehearsal.rehearsing",
    "parameters_on_meta": "mmfsdp.sharding.meta",
    **dict.fromkeys(("apply_plan", "shard"), "mmfsdp.sharding.apply"),
    **dict.fromkeys(("clip_grad_norm_", "no_sync"), "mmfsdp.runtime.training"),
    "full_params": "mmfsdp.runtime.whole_params",
    "sharded_params": "mmfsdp.runtime.sharded_params",
    **dict.fromkeys(("load_model_state_dict", "model_state_dict"), "mmfsdp.state.model"),
    **dict.fromkeys(("load_optim_state_dict", "optim_state_dict"), "mmfsdp.state.optimizer"),
    "load_checkpoint": "mmfsdp.saving.load",
    "load_pretrained": "mmfsdp.saving.pretrained",
    "save_checkpoint": "mmfsdp.saving.save",
}

_NEEDS_TORCH = {*_WHERE} - {"ShardConfig", "ShardPlan", "compare"}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE, needs_torch=_NEEDS_TORCH)
