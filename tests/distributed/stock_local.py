"""Writes `local` checkpoints as stock MMEngine does, beside whole ones of the same state from torch itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

__all__ = ["save_local", "toy", "wrapped"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("table", torch.arange(float(width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x))


class Toy(nn.Module):
    """Nested units, a unit within a unit, tied weights, buffers, sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 5, 3)
        self.blocks = nn.Sequential(Block(5), Block(5))
        self.embed = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x[:, None]).mean(-1))) + self.embed(x[:, :5])


def toy(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Toy()
    if kind == "frozen":
        model.blocks[0].requires_grad_(False)
    return model


def wrapped(kind: str, use_orig_params: bool) -> FullyShardedDataParallel:
    """Kinds: plain, frozen, ignored, bf16, no_shard."""
    model = toy(kind)
    if kind == "bf16":
        model = model.to(torch.bfloat16)
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Sequential}),
        ignored_states=[model.head.bias] if kind == "ignored" else None,
        sharding_strategy=ShardingStrategy.NO_SHARD if kind == "no_shard" else ShardingStrategy.FULL_SHARD,
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
}


def build(kind: str, use_orig_params: bool, optimizer: str) -> tuple[FullyShardedDataParallel, Any]:
    model = wrapped(kind, use_orig_params)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1}]
    optim = OPTIMIZERS[optimizer](groups if use_orig_params else parameters)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 9).to(dtype)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


def local(model: FullyShardedDataParallel, optimizer: Any) -> dict[str, Any]:
    """What stock MMEngine's FSDPStrategy.save_checkpoint writes on each rank."""
    FullyShardedDataParallel.set_state_dict_type(
        model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), LocalOptimStateDictConfig()
    )
    content = {"state_dict": model.state_dict()}
    if optimizer is not None:
        content["optimizer"] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return {**content, "meta": {"epoch": 1, "iter": 2}, "message_hub": {"log": {}}}


def full(model: FullyShardedDataParallel, optimizer: Any) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    ):
        return {
            "state_dict": model.state_dict(),
            "optimizer": full_optimizer(model, optimizer),
        }


def full_optimizer(model: FullyShardedDataParallel, optimizer: Any) -> dict[str, Any]:
    """Gather one kind of state at a time: where the device is the CPU, torch 2.13 returns all of one unit's kinds as
    views of one buffer, so that `exp_avg` has the values of `exp_avg_sq`.
    """
    content = optimizer.state_dict()
    kinds = {name for values in content["state"].values() for name in values if name != "step"}
    result: dict[str, Any] = {}
    for kind in sorted(kinds) or [""]:
        state = {
            key: {name: value for name, value in values.items() if name in (kind, "step")}
            for key, values in content["state"].items()
        }
        gathered = FullyShardedDataParallel.optim_state_dict(model, optimizer, {**content, "state": state})
        whole = result.setdefault("state", {})
        for name, values in gathered["state"].items():
            whole.setdefault(name, {}).update((key, value.clone()) for key, value in values.items())
        result["param_groups"] = gathered["param_groups"]
    return result


def save_local(rank: int, directory: Path, kind: str, use_orig_params: bool, optimizer: str, keep: bool) -> None:
    """Write `local/rank{i}.pth`, `truth.pth` and, of an untrained model, `reference.pth` into a directory."""
    (directory / "local").mkdir(exist_ok=True)
    model, optim = build(kind, use_orig_params, optimizer)
    truth = full(model, optim)
    torch.save(local(model, optim if keep else None), directory / "local" / f"rank{rank}.pth")
    if rank == 0:
        torch.save(truth, directory / "truth.pth")
        torch.save({"state_dict": toy(kind).state_dict()}, directory / "reference.pth")
    dist.barrier()


def by_name(content: dict[str, Any]) -> dict[str, Any]:
    """A ``.pth`` file numbers the parameters of optimizers, with their names beside; DCP goes by the names."""
    groups = content["optimizer"]["param_groups"]
    names = {}
    for group in groups:
        group_names = group.pop("param_names")
        names |= dict(zip(group["params"], group_names, strict=True))
        group["params"] = group_names
    state = {names[number]: value for number, value in content["optimizer"]["state"].items()}
    return {**content, "optimizer": {"state": state, "param_groups": groups}}
