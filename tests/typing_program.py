# pyright: reportUnnecessaryTypeIgnoreComment=error
"""A user's program, which mypy and pyright check: `nox -s types pyright`. It is not run."""

from __future__ import annotations

from typing import assert_type

import torch
import torch.nn as nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

import mmfsdp
from mmfsdp import ShardConfig, ShardPlan, apply_plan, load_checkpoint, plan, save_checkpoint, shard
from mmfsdp.config import (
    ActivationCheckpointingConfig,
    AllOf,
    AnyOf,
    AutoWrap,
    CpuOffloadConfig,
    InitConfig,
    ModuleClassWrap,
    ModuleNameWrap,
    PrecisionConfig,
    PrecisionOverride,
    PrefetchConfig,
    ReferenceWrap,
    ShardingConfig,
    SizeWrap,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(64) for _ in range(4)))

    def generate(self, length: int) -> list[int]:
        return [length]


def train() -> None:
    """What shard() returns has the model's own methods."""
    model = shard(Net(), precision="bf16", wrap=Block)
    assert_type(model, Net)
    assert_type(model.generate(3), list[int])
    decided = plan(model, {"sharding": "FULL_SHARD"}, 8)
    assert_type(decided, ShardPlan)
    assert_type(apply_plan(Net(), decided), Net)
    save_checkpoint("checkpoint.pth", model)
    load_checkpoint("checkpoint.pth", model)
    with mmfsdp.no_sync(model):
        model(torch.zeros(1, 64)).sum().backward()
    mmfsdp.clip_grad_norm_(model, 1.0)


def short_forms() -> list[ShardConfig]:
    """Every short form of docs/reference/configuration.md."""
    made = [
        ShardConfig(precision="bf16", sharding="FULL_SHARD", wrap={"kind": "module_class", "classes": ["Block"]}),
        ShardConfig(precision=torch.bfloat16, sharding=ShardingStrategy.SHARD_GRAD_OP, wrap="Block"),
        ShardConfig(precision={"preset": "bf16", "overrides": [{"modules": "LayerNorm", "param_dtype": "fp32"}]}),
        ShardConfig(sharding={"strategy": "HYBRID_SHARD", "shard_size": 8}, wrap=[Block, nn.Linear]),
        ShardConfig(wrap={Block}, prefetch=BackwardPrefetch.BACKWARD_POST, cpu_offload=True),
        ShardConfig(wrap=["Block", "Linear"], prefetch={"backward": "post"}, cpu_offload={"enabled": True}),
        ShardConfig(wrap=None, prefetch="post", activation_checkpointing="full", init={"seed": 1}),
        ShardConfig(activation_checkpointing={"mode": "every_n", "n": 2}, engine="fsdp2"),
    ]
    assert_type(made[0].precision, PrecisionConfig)
    assert_type(made[0].sharding, ShardingConfig)
    assert_type(made[0].precision.param_dtype, str | None)
    return made


def sections() -> ShardConfig:
    """Each section as an object, with the short forms of its own settings."""
    ReferenceWrap(target="package.module:policy", kwargs={"min_num_params": 10})
    SizeWrap(min_num_params=10, exclude_classes="Linear", force_leaf_classes=[nn.MultiheadAttention])
    ActivationCheckpointingConfig(mode="selective", modules={"kind": "module_class", "classes": "Block"})
    return ShardConfig(
        sharding=ShardingConfig(strategy="full-shard", ignored_modules="head", forward_methods=["encode"]),
        wrap=AnyOf(policies=[ModuleClassWrap(classes=Block), "size", AllOf(policies=(AutoWrap(), "Block"))]),
        precision=PrecisionConfig(
            param_dtype=torch.bfloat16,
            reduce_dtype="fp32",
            ignore_classes=nn.LayerNorm,
            overrides=[PrecisionOverride(modules=[nn.LayerNorm], param_dtype=torch.float32)],
        ),
        activation_checkpointing=ActivationCheckpointingConfig(modules=ModuleNameWrap(patterns="blocks.*")),
        cpu_offload=CpuOffloadConfig(enabled=True),
        prefetch=PrefetchConfig(backward=BackwardPrefetch.BACKWARD_PRE, forward=1),
        init=InitConfig(param_init_fn="package.module:init"),
    )


def mistakes() -> None:
    """A type checker finds these; without the comments, it reports them."""
    ShardConfig(precison="bf16")  # type: ignore[call-arg]
    ShardConfig(cpu_offload="yes")  # type: ignore[arg-type]
    ModuleClassWrap()  # type: ignore[call-arg]
    shard(Net(), engine="fsdp3")  # type: ignore[arg-type]
    mmfsdp.shrad(Net())  # type: ignore[attr-defined]
