"""DistributedDataParallel around a sharded model raises; beside one it trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mmfsdp
from mmfsdp.errors import ShardStateError
from mmfsdp.testing import run_ranks

SIZES = {"kind": "size", "min_num_params": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "replicate": {"sharding": "NO_SHARD"},
    "fsdp1": {"engine": "fsdp1"},
    "flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
}


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))


def wrapped(rank: int, config: str) -> list[str]:
    found = []
    for is_part in (False, True):
        model = build()
        if is_part:
            model[0] = mmfsdp.shard(model[0], {"wrap": SIZES, **CONFIGS[config]})
        else:
            model = mmfsdp.shard(model, {"wrap": SIZES, **CONFIGS[config]})
        with pytest.raises(ShardStateError, match=r"^DistributedDataParallel was given '") as caught:
            DistributedDataParallel(model)
        found.append(str(caught.value.context["fqn"]))
    DistributedDataParallel(build())  # models that are not sharded are nobody's business
    return found


@pytest.mark.parametrize("config", CONFIGS)
def test_it_cannot_be_put_around_a_sharded_model(config: str) -> None:
    """Fails, with engine ``fsdp1`` in a hang, if torch finds out by itself."""
    flat = config == "flat"
    first = ["0.0._flat_param", "0.0._flat_param"] if flat else ["0.0.weight", "0.0.weight"]
    assert run_ranks(wrapped, 2, config, timeout=60) == [first] * 2


def beside(rank: int) -> dict[str, torch.Tensor]:
    model = build()
    mmfsdp.shard(model[0], {"wrap": SIZES})
    model._ddp_params_and_buffers_to_ignore = [f"0.{name}" for name, _ in model[0].named_parameters()]
    trained(DistributedDataParallel(model), torch.arange(16.0).reshape(4, 4).chunk(2)[rank])
    return {**mmfsdp.model_state_dict(model[0], rank0_only=False), **model[1].state_dict()}


def trained(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_may_average_what_is_beside_a_sharded_part() -> None:
    one = build()
    trained(one, torch.arange(16.0).reshape(4, 4))
    expected = {**one[0].state_dict(), **one[1].state_dict()}  # type: ignore[operator, index]
    for found in run_ranks(beside, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
