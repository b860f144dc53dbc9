"""State dicts of a sharded model and its optimizer are those of the unsharded ones, and go both ways."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.distributed.models import BLOCKS, build, train
from torch import nn
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.testing import run_ranks

HYBRID = {"strategy": "HYBRID_SHARD", "shard_size": 2}
CASES = {
    "fsdp2": (2, {"wrap": BLOCKS}),
    "replicate": (2, {"sharding": "NO_SHARD"}),
    "fsdp1": (2, {"engine": "fsdp1", "wrap": BLOCKS}),
    "fsdp1-flat": (2, {"sharding": {"use_orig_params": False}, "wrap": BLOCKS}),
    "fsdp1-replicated": (2, {"engine": "fsdp1", "sharding": "NO_SHARD"}),
    "fsdp2-hybrid": (4, {"sharding": HYBRID, "wrap": BLOCKS}),
    "fsdp1-hybrid": (4, {"engine": "fsdp1", "sharding": HYBRID, "wrap": BLOCKS}),
}


class Unused(nn.Module):
    """A parameter that never gets a gradient, and something that is saved and is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = build("Frozen"), nn.Linear(3, 3)
        self.note = "as built"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Unused() if name == "Unused" else build(name)


def is_flat(config: dict[str, Any]) -> bool:
    return config.get("engine") == "fsdp1"


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    if kind == "all":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "groups":
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        norms = [param for name, param in named if "norm" in name]
        rest = [param for name, param in named if "norm" not in name]
        return torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": rest, "lr": 2e-2}], lr=1e-2)
    return torch.optim.AdamW(trained, lr=1e-2)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(equal(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def close(got: dict[str, Any], want: dict[str, Any], names: Iterable[Any]) -> None:
    for name in names:
        for key, value in want[name].items():
            torch.testing.assert_close(got[name][key], value, rtol=1e-3, atol=1e-5)


def both_ways(rank: int, config: dict[str, Any], name: str, kind: str) -> None:
    single, model = make(name), mmfsdp.shard(make(name), config)
    plain, optimizer = optimizer_of(single, kind), optimizer_of(model, kind)
    train(single, plain, steps=2, sharded=False)
    train(model, optimizer, steps=2)

    # What is gathered is what the unsharded model has.
    full = mmfsdp.model_state_dict(model, rank0_only=False)
    want = single.state_dict()
    assert list(full) == list(want)
    for key, value in want.items():
        if isinstance(value, torch.Tensor):
            assert full[key].shape == value.shape
            torch.testing.assert_close(full[key], value, rtol=1e-3, atol=1e-5)
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    plain_state = plain.state_dict()
    # FSDP1 gives zero gradients to what got none.
    for place in state["state"].keys() - plain_state["state"].keys() if is_flat(config) else ():
        assert not state["state"].pop(place)["exp_avg"].any()
    assert state["state"].keys() == plain_state["state"].keys()
    close(state["state"], plain_state["state"], plain_state["state"])
    for group, wanted in zip(state["param_groups"], plain_state["param_groups"], strict=True):
        assert {key: group[key] for key in wanted} == wanted
    assert bool(mmfsdp.model_state_dict(model)) == bool(mmfsdp.optim_state_dict(model, optimizer)) == (rank == 0)

    # It loads into the plain optimizer of the plain model, and what that saves loads back.
    single.load_state_dict(full)
    plain.load_state_dict(copy.deepcopy(state))
    train(single, plain, steps=1, first=2, sharded=False)
    want, plain_state = copy.deepcopy(single.state_dict()), copy.deepcopy(plain.state_dict())
    for from_rank0 in (False, True):
        mine = not from_rank0 or rank == 0
        other = mmfsdp.shard(make(name), config)
        fresh = optimizer_of(other, kind)
        assert mmfsdp.load_model_state_dict(other, want if mine else {}, from_rank0=from_rank0).clean
        mmfsdp.load_optim_state_dict(other, fresh, plain_state if mine else {}, from_rank0=from_rank0)
        assert equal(mmfsdp.model_state_dict(other, rank0_only=False), dict(want))
        loaded = mmfsdp.optim_state_dict(other, fresh, rank0_only=False)
        if is_flat(config):
            loaded["state"] = {place: loaded["state"][place] for place in plain_state["state"]}
        assert equal(loaded["state"], plain_state["state"])
        assert [group["lr"] for group in loaded["param_groups"]] == [g["lr"] for g in plain_state["param_groups"]]
        if not from_rank0:
            continue
        # And goes on as if nothing had happened.
        train(other, fresh, steps=1, first=3)
        train(single, plain, steps=1, first=3, sharded=False)
        after = mmfsdp.model_state_dict(other, rank0_only=False)
        for key, value in single.state_dict().items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(after[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.sample("fsdp2-adamw", "fsdp2-groups", "fsdp1-flat-sgd", "fsdp1-adamw", "replicate-groups")
@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, "adamw") for case in CASES if case != "fsdp1-flat"]
    + [(case, "groups") for case in ("fsdp2", "replicate", "fsdp1")]
    + [(case, "sgd") for case in ("fsdp2", "fsdp1-flat", "fsdp1-replicated")]
    + [("fsdp1-flat", "all")],  # one flat parameter is of one group
)
def test_both_ways(case: str, kind: str) -> None:
    run_ranks(both_ways, CASES[case][0], CASES[case][1], "Tied", kind)


@pytest.mark.sample("fsdp1-flat-FrozenBlock", "fsdp2-Unused")
@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in ("fsdp2", "replicate", "fsdp1") for name in ("Unused", "Conv")]
    # Frozen parameters beside trained ones, as Unused has them, are refused there.
    + [("fsdp1-flat", "FrozenBlock"), ("fsdp1-flat", "Conv")],
)
def test_models(case: str, name: str) -> None:
    world_size, config = CASES[case]
    wrap = {"kind": "size", "min_num_params": 60} if name == "Conv" else BLOCKS
    run_ranks(both_ways, world_size, {**config, "wrap": wrap}, name, "all")


def fresh_state(rank: int, config: dict[str, Any]) -> None:
    model = mmfsdp.shard(build(), config)
    optimizer = optimizer_of(model, "groups")
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    assert state["state"] == {}
    assert [len(group["params"]) for group in state["param_groups"]] == [4, 10]
    assert not optimizer.state
    mmfsdp.load_optim_state_dict(model, optimizer, state)
    curve = train(model, optimizer, steps=1)
    assert all(float(entry["step"]) == 1 for entry in optimizer.state.values())
    assert curve[0][1] > 0


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "replicate"])
def test_a_fresh_optimizer_has_no_state_and_gets_none(case: str) -> None:
    """torch's get_optimizer_state_dict would leave its step count at 1."""
    run_ranks(fresh_state, *CASES[case])


def sharded_kind(rank: int, config: dict[str, Any], folder: str) -> None:
    model = mmfsdp.shard(build(), config)
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, steps=1)
    sharded = mmfsdp.model_state_dict(model, "sharded")
    state = mmfsdp.optim_state_dict(model, optimizer, "sharded")
    assert any(isinstance(value, DTensor) for value in sharded.values())
    full = mmfsdp.model_state_dict(model, rank0_only=False)
    other = mmfsdp.shard(build(seed=5), config)
    fresh = optimizer_of(other, "adamw")
    mmfsdp.load_model_state_dict(other, sharded)
    mmfsdp.load_optim_state_dict(other, fresh, state)
    assert equal(mmfsdp.model_state_dict(other, rank0_only=False), full)
    assert equal(
        mmfsdp.optim_state_dict(other, fresh, rank0_only=False)["state"],
        mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)["state"],
    )
    dcp.save({"model": sharded}, checkpoint_id=folder)
    if rank == 0:
        torch.save(full, f"{folder}/full.pth")
    dist.barrier()


@pytest.mark.sample("fsdp2", "replicate")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # this process reads what ranks wrote
@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "replicate", "fsdp2-hybrid"])
def test_sharded_state_dicts_are_torchs_own_to_read(case: str, tmp_path: Any) -> None:
    run_ranks(sharded_kind, *CASES[case], str(tmp_path))
    target = {"model": build(seed=9).state_dict()}
    dcp.load(target, checkpoint_id=str(tmp_path), no_dist=True)
    assert equal(target["model"], torch.load(tmp_path / "full.pth"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def resume_shared(rank: int, folder: str) -> None:
    """Train a model in which a unit is registered twice, save, train on, and do so again from the checkpoint."""

    def build(seed: int, use_orig_params: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        block = Block()
        model: nn.Module = nn.Sequential(block, Block(), block, nn.Linear(8, 4))
        sharding = {"use_orig_params": use_orig_params}
        model = mmfsdp.shard(model, wrap="Block", engine="fsdp1", sharding=sharding)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        for step in range(2):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return mmfsdp.model_state_dict(model, rank0_only=False)

    for use_orig_params in (True, False):
        for kind in ("full", "local", "sharded"):
            path = f"{folder}/{use_orig_params}_{kind}" + (".pth" if kind == "full" else "")
            model, optimizer = build(0, use_orig_params)
            train(model, optimizer)
            mmfsdp.save_checkpoint(path, model, optimizer, kind=kind)  # type: ignore[arg-type]
            expected = train(model, optimizer)
            assert expected["2.first.weight"].shape == (16, 8)
            model, optimizer = build(1, use_orig_params)
            mmfsdp.load_checkpoint(path, model, optimizer)
            torch.testing.assert_close(train(model, optimizer), expected, rtol=0, atol=0)


@pytest.mark.exhaustive
def test_a_unit_that_is_registered_twice_resumes_with_flat_parameters(tmp_path: Path) -> None:
    run_ranks(resume_shared, 2, str(tmp_path))
