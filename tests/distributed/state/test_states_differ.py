"""One rank that is given another state, or one that cannot be loaded: loading ends on every rank, unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.testing import run_ranks

SIZES = {"kind": "size", "min_num_params": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp1": {"engine": "fsdp1"},
    "flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
}
X = torch.ones(3, 4)


class Failing(dict[str, Any]):
    """A mapping that reads its values when asked for them, from a disk that fails."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("the disk failed")

    def items(self) -> Any:
        raise OSError("the disk failed")

    get = values = items


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def spoilt(state: dict[str, Any], model: nn.Module, how: str) -> Any:
    first = next(iter(state))
    if how == "shards":
        shards = mmfsdp.model_state_dict(model, "sharded")
        return {name: shards[name].clone() if isinstance(shards[name], DTensor) else state[name] for name in state}
    changes = {"mapping": Failing(state), "nothing": None, "meta": {**state, first: state[first].to("meta")}}
    return changes[how]


def loaded(rank: int, engine: str, how: str) -> tuple[str, bool]:
    """What loading said, with another state on the last rank; and whether the model is as before."""
    plain = build()
    model = mmfsdp.shard(build(), {"wrap": SIZES, **ENGINES[engine]})
    if how == "shards" and engine == "fsdp1":
        mmfsdp.model_state_dict(model, "sharded")  # collective
    state: Any = {name: value + 1 for name, value in plain.state_dict().items()}
    if how == "shards":
        own = spoilt(state, model, how)  # collective
        state = own if rank else state
    elif rank:
        state = spoilt(state, model, how)
    try:
        mmfsdp.load_model_state_dict(model, state)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    now = mmfsdp.model_state_dict(model, rank0_only=False)
    return said, all(torch.equal(now[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("engine", "how", "message"),
    [
        ("fsdp2", "mapping", "OSError: the disk failed"),
        ("fsdp1", "mapping", "OSError: the disk failed"),
        ("fsdp2", "nothing", "A state dict must be a mapping"),
        (
            "fsdp1",
            "shards",
            "for '0.weight' of the state dict the first rank has a whole tensor, and this rank a shard",
        ),
        ("flat", "shards", "for '0.weight' of the state dict the first rank has a whole tensor, and this rank a shard"),
    ],
)
def test_a_models_state(engine: str, how: str, message: str) -> None:
    """Fails, in a hang, if a rank reads its state, or chooses how to load it, without the others."""
    for rank, (said, unchanged) in enumerate(run_ranks(loaded, 2, engine, how, timeout=60)):
        assert message in said
        assert rank or "Rank 1 failed: " in said
        assert unchanged


def from_the_first(rank: int, engine: str) -> bool:
    want = {name: value + 1 for name, value in build().state_dict().items()}
    model = mmfsdp.shard(build(), {"wrap": SIZES, **ENGINES[engine]})
    mmfsdp.load_model_state_dict(model, None if rank else want, from_rank0=True)  # type: ignore[arg-type]
    now = mmfsdp.model_state_dict(model, rank0_only=False)
    return all(torch.equal(now[name], value) for name, value in want.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_other_ranks_may_give_nothing_where_the_first_one_has_all(engine: str) -> None:
    assert all(run_ranks(from_the_first, 2, engine, timeout=60))


def spoilt_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer, how: str) -> dict[str, Any]:
    state = copy.deepcopy(state)
    if how == "fewer":
        del state["state"][0]["exp_avg"]
    if how == "text":
        state["state"][0]["exp_avg"] = "hello"
    if how == "meta":
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].to("meta")
    if how == "refused":

        def refuse(given: Any) -> None:
            raise ValueError("not in this optimizer")

        optimizer.load_state_dict = refuse  # type: ignore[method-assign]
    return state


def loaded_optimizer(rank: int, engine: str, how: str) -> str:
    state = stepped(build()).state_dict()
    model = mmfsdp.shard(build(), {"wrap": SIZES, **ENGINES[engine]})
    optimizer = stepped(model)
    shards = mmfsdp.optim_state_dict(model, optimizer, "sharded")
    if rank:
        state = shards if how == "shards" else spoilt_optimizer(state, optimizer, how)
    try:
        mmfsdp.load_optim_state_dict(model, optimizer, state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("engine", "how", "message"),
    [
        (
            "fsdp2",
            "fewer",
            "for '0.exp_avg' of the optimizer's state the first rank has a tensor, and this rank nothing",
        ),
        ("flat", "fewer", "the first rank has a whole tensor, and this rank nothing"),
        ("fsdp2", "text", "the first rank has a tensor, and this rank another value"),
        ("fsdp2", "meta", "meta"),
        (
            "fsdp1",
            "meta",
            "'0.weight.exp_avg' of the optimizer's state is a torch.strided tensor on meta. Give a dense",
        ),
        ("fsdp1", "shards", "the first rank has a whole tensor, and this rank a shard"),
        ("flat", "shards", "the first rank has a whole tensor, and this rank a shard"),
        ("fsdp2", "refused", "ValueError: not in this optimizer"),
        ("fsdp1", "refused", "ValueError: not in this optimizer"),
        ("flat", "refused", "ValueError: not in this optimizer"),
    ],
)
def test_an_optimizers_state(engine: str, how: str, message: str) -> None:
    for rank, said in enumerate(run_ranks(loaded_optimizer, 2, engine, how, timeout=60)):
        assert message in said
        assert rank or "Rank 1 failed: " in said


def test_whole_tensors_and_shards_may_meet_where_each_rank_takes_its_part() -> None:
    assert run_ranks(loaded_optimizer, 2, "fsdp2", "shards") == ["", ""]
