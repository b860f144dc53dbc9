"""Saving and evaluating between the micro-batches of a step, while gradients accumulate inside no_sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.distributed.models import BLOCKS, adamw, build
from torch import nn

import mmfsdp
from mmfsdp.testing import run_ranks

X = torch.arange(8)


def evaluate(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model(X)


def look_at_whole(model: nn.Module, optimizer: Any) -> None:
    with mmfsdp.full_params(model):
        pass


def load_optimizer(model: nn.Module, optimizer: Any) -> None:
    mmfsdp.load_optim_state_dict(model, optimizer, mmfsdp.optim_state_dict(model, optimizer, rank0_only=False))


BETWEEN: dict[str, Callable[[nn.Module, Any], Any]] = {
    "weights": lambda model, optimizer: mmfsdp.model_state_dict(model),
    "shards": lambda model, optimizer: mmfsdp.model_state_dict(model, "sharded"),
    "optimizer": mmfsdp.optim_state_dict,
    "optimizer's shards": lambda model, optimizer: mmfsdp.optim_state_dict(model, optimizer, "sharded"),
    "evaluation": evaluate,
    "whole": look_at_whole,
    "load": load_optimizer,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1 SHARD_GRAD_OP": {"engine": "fsdp1", "sharding": "SHARD_GRAD_OP"},
    "fsdp1 flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
}


def grown(rank: int, config: dict[str, Any], between: Callable[[nn.Module, Any], Any] | None) -> list[torch.Tensor]:
    model = mmfsdp.shard(build("Attention"), {"wrap": BLOCKS, **config})
    optimizer = adamw(model)
    for step in range(2):
        for micro in range(3):
            with mmfsdp.no_sync(model) if micro < 2 else contextlib.nullcontext():
                loss = model((X + step + micro + rank) % 10).square().mean()
            loss.backward()
            if micro == step and micro < 2 and between is not None:
                between(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return list(mmfsdp.model_state_dict(model, rank0_only=False).values())


def disturbed(rank: int, config: dict[str, Any]) -> list[str]:
    reference = grown(rank, config, None)
    return [
        name for name, between in BETWEEN.items() if not all(map(torch.equal, reference, grown(rank, config, between)))
    ]


@pytest.mark.sample("fsdp2")
@pytest.mark.parametrize("name", CONFIGS)
def test_accumulated_gradients_are_kept(name: str) -> None:
    """Fails if FSDP1's whole gradients are not put back: "attempting to assign a gradient of size ..."."""
    assert run_ranks(disturbed, 2, CONFIGS[name]) == [[], []]
