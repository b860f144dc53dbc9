"""Models that use their modules in ways that sharding could break: running over a Sequential, looking up classes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import mmfsdp
from mmfsdp.testing import run_ranks

KNOWN: dict[str, int] = {}


class Stages(nn.Module):
    """Runs over its Sequentials without calling them, nested ones too, and uses what comes out on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        self.called = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        taps = []
        for layer in self.layers:
            for part in layer:
                x = part(x)
            taps.append(x)
        return self.called(taps[0] + taps[-1])


def grow(model: nn.Module, inputs: Iterable[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x in inputs:
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def over_a_sequential(rank: int, patterns: list[str], settings: dict) -> None:
    torch.manual_seed(2)
    model, inputs = Stages(), torch.randn(4, 6, 4)
    expected = grow(model, inputs)
    torch.manual_seed(2)
    config = {"wrap": {"kind": "module_name", "patterns": patterns}, **settings}
    sharded = mmfsdp.shard(Stages(), config)
    assert grow(sharded, inputs) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        sharded(inputs[0])
    assert all(hasattr(param, "placements") for param in sharded.parameters())


@pytest.mark.parametrize(
    ("patterns", "settings"),
    [
        (["layers", "called"], {}),
        (["layers", "layers.1", "called"], {}),
        (["layers.*", "called"], {"prefetch": {"forward": 1}}),
        (["layers", "called"], {"sharding": "SHARD_GRAD_OP"}),
        (["layers", "called"], {"activation_checkpointing": "full"}),
    ],
    ids=["whole", "nested", "each", "grad-op", "checkpointed"],
)
def test_a_sequential_that_is_run_over(patterns: list[str], settings: dict) -> None:
    run_ranks(over_a_sequential, 2, patterns, settings)


class Registered(nn.Linear):
    """Looks itself up by the name of its class, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        KNOWN[str(type(self))] = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * KNOWN[str(type(self))]


def looked_up(rank: int) -> None:
    model = mmfsdp.shard(nn.Sequential(Registered(), Registered()), {"wrap": {"kind": "size", "min_num_params": 1}})
    model(torch.ones(2, 4)).sum().backward()
    assert isinstance(model[0], FSDPModule)
    assert type(model[0]).__name__ == "Registered"  # in messages too


def test_a_class_is_found_by_its_name() -> None:
    run_ranks(looked_up, 2)
