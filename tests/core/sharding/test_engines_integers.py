"""Parameters of integers, such as packed weights of 4 bits, which torch's ``fully_shard`` takes from 2.12 on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.basics.torch_releases import SHARDS_INTEGERS, torch_has
from mmfsdp.errors import ConfigError
from mmfsdp.sharding.engines import fsdp2
from mmfsdp.testing import single_rank


class Packed(nn.Module):
    """A weight whose values lie two in a byte, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.arange(32, dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat([self.packed & 15, self.packed >> 4]) * self.scale


def test_it_is_sharded_or_named() -> None:
    model = Packed()
    expected = model(torch.ones(64))
    with single_rank():
        if not torch_has(SHARDS_INTEGERS):
            with pytest.raises(ConfigError, match=r"packed has dtype uint8.*sharding.ignored_parameters"):
                mmfsdp.shard(model, {"engine": "fsdp2"})
        else:
            assert torch.equal(mmfsdp.shard(model, {"engine": "fsdp2"})(torch.ones(64)), expected)


def test_it_can_be_left_out() -> None:
    model = Packed()
    expected = model(torch.ones(64))
    with single_rank():
        sharded = mmfsdp.shard(model, {"engine": "fsdp2", "sharding": {"ignored_parameters": ["packed"]}})
        assert torch.equal(sharded(torch.ones(64)), expected)


def test_older_torch_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "torch_has", lambda first: False)
    plan = mmfsdp.plan(Packed(), {"engine": "fsdp2"}, 2)
    (problem,) = fsdp2.Fsdp2Engine().unsupported(plan, "cpu")
    assert problem.startswith("packed has dtype uint8, and torch before 2.12 shards floating point only.")
    left_out = mmfsdp.plan(Packed(), {"engine": "fsdp2", "sharding": {"ignored_parameters": ["packed"]}}, 2)
    assert not fsdp2.Fsdp2Engine().unsupported(left_out, "cpu")
