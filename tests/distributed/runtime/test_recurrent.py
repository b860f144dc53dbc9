"""Recurrent networks move their weights into one piece of memory, where cuDNN wants them; sharded ones must not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ShardStateError
from mmfsdp.testing import run_ranks


class Flattening(nn.LSTM):
    """Moves its weights on the CPU, too: torch's own ``flatten_parameters`` does nothing there."""

    def flatten_parameters(self) -> None:
        weights = [weight for weight in self._flat_weights if weight is not None]
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.data = part.view_as(weight)


class Tagger(nn.Module):
    """A recurrent network that is flattened in the forward, as many models of old do, and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.cells = Flattening(6, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cells.flatten_parameters()
        found: torch.Tensor = self.head(self.cells(self.stem(x))[0])
        return found


@pytest.mark.sample("in the root-fsdp2")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
@pytest.mark.parametrize("patterns", [["cells"], ["stem"]], ids=["a unit", "in the root"])
def test_it_trains(engine: str, patterns: list[str]) -> None:
    config = {"wrap": {"kind": "module_name", "patterns": patterns}, "engine": engine}
    proof = mmfsdp.prove(Tagger, torch.empty(3, 5, 4), config=config, steps=4)
    assert proof.proven, str(proof)


def copied(rank: int) -> None:
    cells = mmfsdp.shard(nn.LSTM(2, 2), {"sharding": "NO_SHARD"})
    method, (plain, module) = vars(cells)["flatten_parameters"].__reduce__()
    assert cells.flatten_parameters() is None
    assert method(plain, module) == nn.LSTM.flatten_parameters.__get__(cells)  # of a copy


def test_a_copy_flattens_again() -> None:
    run_ranks(copied, 1)


class Moving(nn.Linear):
    """Puts its weight elsewhere when it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def moved(rank: int) -> None:
    model = mmfsdp.shard(nn.Sequential(Moving(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ShardStateError, match=r"'0\.weight' was moved to other memory in a forward"):
        optimizer.step()


def test_other_modules_that_move_weights_are_named() -> None:
    run_ranks(moved, 2)
