"""In-place operations right behind a unit whose output is a view, as in mmcv's FFN."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import mmfsdp
from mmfsdp.testing import run_ranks

DIM = 8


class Many(nn.Module):
    """Returns views in a structure, one of them of what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.fc(x)
        return {"pair": (y.transpose(0, 1), self.fc(x).flatten(0, 1)), "same": x.view(-1, DIM), "none": None}


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.second, self.third = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.many = Many()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return CASES[self.case](self, x)


def ffn(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.third(net.act(net.second(net.act(net.first(x)))) + x)


def structure(net: Net, x: torch.Tensor) -> torch.Tensor:
    out = net.many(net.first(x) * 1)
    a, b = out["pair"]
    a.mul_(2)
    b.relu_()
    return net.third(a.transpose(0, 1) + b.view(x.shape) + out["same"].view(x.shape))


def twice(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.act(net.second(net.act(net.first(x))))
    return net.act(net.second(x)) + net.act(net.first(x))


def checkpointed(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda x: net.act(net.second(net.act(net.first(x)))), x, use_reentrant=False)
    return checkpoint(net.third, y, use_reentrant=False).add_(1).sin()


CASES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "ffn": ffn,
    "structure": structure,
    "twice": twice,
    "checkpointed": checkpointed,
    "last": lambda net, x: net.third(net.second(net.first(x))),
}
WRAP = {"kind": "module_name", "patterns": ["first", "second", "third", "many"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"wrap": WRAP},
    "SHARD_GRAD_OP": {"wrap": WRAP, "sharding": "SHARD_GRAD_OP"},
    "NO_SHARD": {"wrap": WRAP, "sharding": "NO_SHARD"},
    "full checkpointing": {"wrap": WRAP, "activation_checkpointing": "full"},
    "root only": {"wrap": "none"},
}


def train(model: nn.Module, shape: tuple[int, ...], rank: int, world: int) -> None:
    """On the part of the global batch that is a rank's; all ranks' together are the single process's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, *shape, DIM, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        out = model(x)
        out.mul_(3)  # behind the root
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(rank: int, config: dict[str, Any]) -> dict[str, float]:
    world, worst = dist.get_world_size(), {}
    for case in CASES:
        for shape in ((3,), ()):
            if case == "structure" and not shape:
                continue
            torch.manual_seed(1)
            alone = Net(case)
            sharded = mmfsdp.shard(copy.deepcopy(alone), config)
            with warnings.catch_warnings(record=True) as caught:
                train(sharded, shape, rank, world)
            assert not [str(warning.message) for warning in caught if "view" in str(warning.message)]
            train(alone, shape, 0, 1)
            found = mmfsdp.model_state_dict(sharded, rank0_only=False)
            worst[f"{case} {shape}"] = max(
                (found[name] - value).abs().max().item() for name, value in alone.state_dict().items()
            )
    return worst


@pytest.mark.sample("root only", "full checkpointing")
@pytest.mark.parametrize("name", CONFIGS)
def test_trains_as_one_process(name: str) -> None:
    """Fails without `keep_backward_hook`: "setStorage ... storage of size 0" in backward, or a wrong gradient."""
    for worst in run_ranks(compare, 2, CONFIGS[name]):
        assert worst == pytest.approx(dict.fromkeys(worst, 0), abs=1e-6)
