"""Models that change parameters in their forward train as they do in one process, or are told how to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mmfsdp
from mmfsdp import sharded_params
from mmfsdp.errors import ShardStateError, UnsupportedCallError
from mmfsdp.runtime.sharded_params import average_on_shards
from mmfsdp.testing import run_ranks

HALF = get_ema_multi_avg_fn(0.5)
UPDATES = ("in place", "assigned", "averaged model")
CONFIGS: dict[str, dict[str, Any]] = {
    "all in the root": {"wrap": "none"},
    "as different units": {"wrap": {"kind": "module_name", "patterns": ["online", "momentum.*"]}},
    "gathered until backward": {
        "wrap": {"kind": "module_name", "patterns": ["online.*"]},
        "sharding": {"strategy": "SHARD_GRAD_OP"},
    },
    "replicate": {"engine": "replicate"},
}


class Contrast(nn.Module):
    """Has a momentum encoder that follows the trained one, in each forward, after that has run."""

    def __init__(self, update: str) -> None:
        super().__init__()
        self.update = update
        self.online = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        copied = copy.deepcopy(self.online)
        self.momentum = AveragedModel(copied, multi_avg_fn=HALF) if update == "averaged model" else copied
        self.momentum.requires_grad_(False)
        self.averages = dict(self.momentum.named_parameters())  # a reference of its own, as MMEngine's averages have
        self.head = nn.Linear(3, 4)

    def follow(self) -> None:
        for (_, online), average in zip(self.online.named_parameters(), self.averages.values(), strict=True):
            if self.update == "assigned":
                average.data = average.data * 0.5 + online.data * 0.5
            else:
                average.lerp_(online, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.online(x)
        with torch.no_grad():
            if isinstance(self.momentum, AveragedModel):
                self.momentum.update_parameters(self.online)
            elif self.update != "unaware":
                with sharded_params(self.online, self.momentum):
                    self.follow()
            else:
                self.follow()
            target = self.momentum(x)
        return (self.head(found).mean() - target.mean()).square()


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = model(torch.linspace(-1, 1, 30).view(6, 5) + step).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains_as_one_process_does(_: int) -> None:
    for update in UPDATES:
        torch.manual_seed(0)
        one = Contrast(update)
        start = copy.deepcopy(one)
        losses = trained(one)
        pairs = zip(one.momentum.parameters(), start.momentum.parameters(), strict=True)
        assert not any(torch.equal(param, before) for param, before in pairs)
        for name, config in CONFIGS.items():
            model = mmfsdp.shard(copy.deepcopy(start), config)
            assert trained(model) == losses, (update, name)
            with mmfsdp.full_params(model):
                for (key, param), expected in zip(model.named_parameters(), one.parameters(), strict=True):
                    torch.testing.assert_close(param, expected, rtol=0, atol=0, msg=f"{update}, {name}: {key}")


class Codebook(nn.Linear):
    """Writes its own weight when it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.data.mul_(0.5)
        return super().forward(x)


def says_what_is_lost(_: int) -> None:
    mixed = mmfsdp.shard(Contrast("unaware"), CONFIGS["all in the root"])
    with pytest.raises(RuntimeError, match="mixed") as caught:
        trained(mixed)
    assert "mmfsdp.sharded_params" in caught.value.__notes__[0]
    for wrap in ("none", {"kind": "module_class", "classes": ["Codebook"]}):
        model = mmfsdp.shard(nn.Sequential(Codebook(5, 5), nn.Flatten(0)), {"wrap": wrap})
        with pytest.raises(ShardStateError, match=r"^'0\.weight' was written in a forward.*sharded_params"):
            trained(model)
    flat = mmfsdp.shard(Contrast("in place"), {"engine": "fsdp1", "wrap": "none"})
    with pytest.raises(UnsupportedCallError, match="Write engine 'fsdp2'"):
        trained(flat)


def test_trains_as_one_process_does() -> None:
    run_ranks(trains_as_one_process_does, 2)


def test_says_what_is_lost() -> None:
    run_ranks(says_what_is_lost, 2)


def test_copies_average_themselves() -> None:
    model = nn.ModuleDict({"online": nn.Linear(2, 2)})
    model["average"] = AveragedModel(model["online"], multi_avg_fn=HALF)
    before = model["average"].module.weight.clone()
    average_on_shards(model)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied["online"].weight)
    for _ in range(2):
        copied["average"].update_parameters(copied["online"])
    assert torch.equal(model["average"].module.weight, before)
    assert torch.equal(copied["average"].module.weight, torch.zeros(2, 2))
