"""`functional_call` with other weights raises and leaves the model alone; with other whole ones it works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import stateless

import mmfsdp
from mmfsdp.errors import ShardStateError
from mmfsdp.testing import run_ranks

SIZES = {"kind": "size", "min_num_params": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad": {"sharding": "SHARD_GRAD_OP"},
    "none": {"sharding": "NO_SHARD"},
    "fewer": {"sharding": {"reshard_after_forward": 2}},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1 none": {"engine": "fsdp1", "sharding": "NO_SHARD"},
    "flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
}
X = torch.arange(8.0).reshape(2, 4)


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 4))


def called(rank: int, config: str, ran_before: bool) -> list[tuple[str, float]]:
    """The errors of calls with other shards, and how far the model is from an equal one after each."""
    plain = build()
    model = mmfsdp.shard(build(), {"wrap": SIZES, **CONFIGS[config]})
    if ran_before:
        model(X)
    found = []
    for names in ([name for name, _ in model.named_parameters()], [[*dict(model.named_parameters())][-1]]):
        for wrap in (nn.Parameter, torch.Tensor.detach):
            other = {name: wrap(param.detach() * 2) for name, param in model.named_parameters() if name in names}
            with pytest.raises(ShardStateError, match=r"^functional_call\(\) was given other weights for ") as caught:
                functional_call(model, other, (X,))
            found.append((str(caught.value.context["fqn"]), float((model(X) - plain(X)).abs().max())))
    return found


@pytest.mark.parametrize("ran_before", [True, False])
@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "fewer"])
def test_other_weights_are_neither_ignored_nor_kept(config: str, ran_before: bool) -> None:
    """Fails on torch alone: before the first forward it keeps them, later it computes without them."""
    first, last = ("0._flat_param", "2._flat_param") if config == "flat" else ("0.weight", "2.bias")
    for found in run_ranks(called, 2, config, ran_before):
        assert [name for name, _ in found] == [first] * 2 + [last] * 2
        assert max(difference for _, difference in found) < 1e-6


def test_with_parameters_gathered_from_fewer_ranks() -> None:
    for found in run_ranks(called, 4, "fewer", True):
        assert max(difference for _, difference in found) < 1e-6


def right(rank: int) -> list[float]:
    """Differences of calls that replace buffers and whole parameters, and of calls after them."""
    plain = build()
    model = mmfsdp.shard(build(), {"wrap": SIZES, "sharding": {"ignored_modules": ["2"]}})
    other = {"1.running_mean": torch.ones(4), "2.weight": torch.eye(4)}
    differences = []
    for gradients in (True, False, True):
        with torch.set_grad_enabled(gradients):
            got = functional_call(model, other, (X,))
            differences += [float((got - functional_call(plain, other, (X,))).abs().max())]
            differences += [float((model(X) - plain(X)).abs().max())]
    return differences


def test_buffers_and_whole_parameters_may_be_replaced() -> None:
    for found in run_ranks(right, 2):
        assert max(found) < 1e-6


def written(rank: int) -> float:
    """The way out that the error names."""
    plain, model = build(), mmfsdp.shard(build(), {"wrap": SIZES})
    want = functional_call(plain, {name: param.detach() * 2 for name, param in plain.named_parameters()}, (X,))
    kept = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param * 2)
        got = model(X)
        for name, param in model.named_parameters():
            param.copy_(kept[name])
    return float((got - want).abs().max()) + float((model(X) - plain(X)).abs().max())


def test_the_way_out_is_right() -> None:
    assert max(run_ranks(written, 2)) < 1e-6


def test_the_file_of_functional_call_is_where_it_is_looked_for() -> None:
    assert stateless._functional_call.__code__.co_filename == stateless.__file__
