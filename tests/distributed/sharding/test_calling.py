"""Models that use their modules in ways that sharding could break: running over a Sequential, looking up classes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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


def evaluated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Afterwards each rank holds its shards again."""
    found: torch.Tensor = model(x)
    assert dist.get_world_size() == 1 or all(hasattr(param, "placements") for param in model.parameters())
    return found


@pytest.mark.sample("grad-op", "checkpointed")
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
def test_a_sequential_that_is_run_over(patterns: list[str], settings: dict[str, object]) -> None:
    config = {"wrap": {"kind": "module_name", "patterns": patterns}, **settings}
    proof = mmfsdp.prove(Stages, torch.empty(3, 4), config=config, steps=2, evaluate=evaluated)
    assert proof.proven, str(proof)


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
