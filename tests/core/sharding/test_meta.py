"""Models built without memory for their parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmfsdp.sharding.meta import parameters_on_meta


class Tied(nn.Module):
    """Reads a tensor while it is built, and ties weights in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.register_buffer("steps", torch.arange(3))
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.ones(4), requires_grad=False)
        self.first, self.second = shared, shared
        self.missing = None
        self.register_parameter("none", None)


def test_parameters_are_on_meta_and_all_else_is_real() -> None:
    with parameters_on_meta():
        model = Tied()
    assert all(param.is_meta for param in model.parameters())
    assert model.rates == [0.0, 0.5, 1.0]
    assert model.steps.tolist() == [0, 1, 2]
    assert model.none is None


def test_tied_parameters_stay_tied() -> None:
    with parameters_on_meta():
        model = Tied()
    assert model.head.weight is model.embed.weight
    assert model.first is model.second
    assert not model.first.requires_grad
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Tied().named_parameters()]


def test_ends_with_the_block_whatever_happens() -> None:
    with pytest.raises(ValueError, match="in the constructor"), parameters_on_meta():
        raise ValueError("in the constructor")
    assert not nn.Linear(2, 2).weight.is_meta
