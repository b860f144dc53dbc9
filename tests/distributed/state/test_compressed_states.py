"""Optimizer state that is compressed on each rank comes back on any ranks; what cannot come back is refused at save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.compressed_adam import Codes, CompressedMomentum, Keeping, Projector
from torch import nn
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.checkpoint import convert, verify
from mmfsdp.errors import StateDictError
from mmfsdp.testing import run_ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "replicate": {"sharding": "NO_SHARD"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-flat": {"sharding": {"use_orig_params": False}},
}
KINDS = ("sharded", "local", "full.pth")


def is_flat(config: dict[str, Any]) -> bool:
    return config in (CONFIGS["fsdp1"], CONFIGS["fsdp1-flat"])


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rank: int = 0, ranks: int = 1) -> None:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)).chunk(ranks)[rank]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def forms(optimizer: torch.optim.Optimizer) -> set[type]:
    """Return how this rank holds the momentum."""
    values = [state["momentum"] for state in optimizer.state.values()]
    return {type(value.to_local() if isinstance(value, DTensor) else value) for value in values}


def save_as(name: str, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kind: Any = name.removesuffix(".pth")
    mmfsdp.save_checkpoint(f"{folder}/{name}", model, optimizer, kind=kind)


def close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0.01 * value.abs().max().item())


def save(rank: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    model = mmfsdp.shard(build(), config)
    optimizer = CompressedMomentum(model.parameters())
    for seed in range(3):
        step(model, optimizer, seed, rank, dist.get_world_size())
    assert Codes in forms(optimizer)
    for kind in KINDS:
        save_as(kind, folder, model, optimizer)
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    assert Codes in forms(optimizer)  # what it has is not changed
    return state


def load(rank: int, config: dict[str, Any], folder: str, kinds: tuple[str, ...]) -> list[Any]:
    found = []
    for kind in kinds:
        model = mmfsdp.shard(build(), config)
        optimizer = CompressedMomentum(model.parameters())
        mmfsdp.load_checkpoint(f"{folder}/{kind}", model, optimizer)
        # Of three ranks, each holds a part of a flat parameter that has no whole number of blocks.
        assert Codes in forms(optimizer) or (is_flat(config) and dist.get_world_size() == 3)
        if kind == "full.pth" and not is_flat(config):  # by position, with the names in another order
            backwards = CompressedMomentum([*model.parameters()][::-1])
            mmfsdp.load_checkpoint(f"{folder}/{kind}", model, backwards)
            assert Codes in forms(backwards)
        loaded = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
        for seed in range(3, 5):
            step(model, optimizer, seed, rank, dist.get_world_size())
        found.append((loaded, mmfsdp.model_state_dict(model, rank0_only=False)))
    return found


@pytest.mark.sample("replicate", "fsdp1-flat")
@pytest.mark.parametrize("case", CONFIGS)
def test_it_comes_back_on_any_ranks(case: str, tmp_path: Path) -> None:
    config, folder = CONFIGS[case], str(tmp_path)
    saved = run_ranks(save, 2, config, folder)[0]
    # What is saved is the values that the ranks had, and equals the state of one process.
    single = build()
    optimizer = CompressedMomentum(single.parameters())
    for seed in range(3):
        step(single, optimizer, seed)
    for place, entries in optimizer.state_dict()["state"].items():
        close(saved["state"][place], {"momentum": entries["momentum"] + 0.0, "step": entries["step"]})
    for seed in range(3, 5):
        step(single, optimizer, seed)
    # Files hold plain tensors, which need no class: they are verified, converted and loaded by torch.
    assert torch.load(tmp_path / "full.pth", weights_only=True)["optimizer"]["state"].keys() == saved["state"].keys()
    for kind in KINDS:
        assert verify(tmp_path / kind).ok
    convert(tmp_path / "sharded", tmp_path / "converted.pth", keep="all")
    for ranks, kinds in ((3, (*KINDS, "converted.pth")), (2, KINDS[:1])):
        for loaded, weights in run_ranks(load, ranks, config, folder, kinds)[0]:
            for place, entries in saved["state"].items():
                close(loaded["state"][place], entries)
            close(weights, {name: value.detach() for name, value in single.state_dict().items()})


def kept_by(name: str) -> Any:
    return {
        "object": lambda param: Projector(),
        "object on one rank": lambda param: Projector() if dist.get_rank() else 0,
        "object in a list": lambda param: [1.0, {"a": Projector()}],
        "shards in a list": lambda param: [torch.zeros_like(param)],
        "other shape": lambda param: torch.zeros_like(param).repeat(2),
        "text": lambda param: "warm",
        "plain": lambda param: [{"history": [torch.full((3,), 2.0)], "more": (True, None, 1.5)}],
    }[name]


REFUSED = {
    "object": "'kept' of a parameter as a tests.distributed.compressed_adam.Projector object",
    "object on one rank": "'kept' of a parameter as a tests.distributed.compressed_adam.Projector object",
    "object in a list": "'kept/1/a' of a parameter as a tests.distributed.compressed_adam.Projector object",
    "shards in a list": "'kept/0' of a parameter as a DTensor within a list",
    "text": "'kept' of a parameter as a builtins.str, which torch's load_state_dict()",
    "other shape": "'kept' of a parameter as a DTensor of shape (32,)",
}


def refuse(rank: int, folder: str) -> dict[str, list[str]]:
    model = mmfsdp.shard(build())
    found: dict[str, list[str]] = {}
    for name in REFUSED:
        optimizer = Keeping(model.parameters(), lr=0.1)
        optimizer.kept = kept_by(name)
        step(model, optimizer, 0)
        for kind in KINDS:
            try:
                save_as(kind, folder, model, optimizer)
            except StateDictError as error:
                found.setdefault(name, []).append(str(error))
    return found


def test_what_cannot_come_back_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(refuse, 2, str(tmp_path)):
        assert found.keys() == REFUSED.keys()
        for name, texts in found.items():
            assert len(texts) == len(KINDS)
            for text in texts:
                assert REFUSED[name] in text
                assert "Keeping keeps" in text
                assert "fqn='2.bias'" in text
                assert "Save the model without the optimizer" in text
    assert not [*tmp_path.iterdir()]


def keep_plain(rank: int, folder: str, config: dict[str, Any]) -> list[Any]:
    model = mmfsdp.shard(build(), config)
    optimizer = Keeping(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    optimizer.kept = kept_by("plain")
    step(model, optimizer, 0)
    found = []
    for kind in KINDS:
        save_as(kind, folder, model, optimizer)
        again = Keeping(model.parameters(), lr=torch.tensor(0.3), momentum=0.9)
        mmfsdp.load_checkpoint(f"{folder}/{kind}", model, again)
        found.append((again.state[[*model.parameters()][-1]]["kept"], again.param_groups[0]["lr"]))
    state = mmfsdp.optim_state_dict(model, optimizer)
    again = Keeping(model.parameters(), lr=torch.tensor(0.3), momentum=0.9)
    mmfsdp.load_optim_state_dict(model, again, state, from_rank0=True)
    found.append((again.state[[*model.parameters()][-1]]["kept"], again.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("case", ["fsdp2", "replicate"])
def test_tensors_in_lists_and_settings_come_back(case: str, tmp_path: Path) -> None:
    for found in run_ranks(keep_plain, 2, str(tmp_path), CONFIGS[case]):
        assert len(found) == len(KINDS) + 1
        for kept, lr in found:
            assert torch.equal(kept[0].pop("history")[0], torch.full((3,), 2.0))
            assert kept == [{"more": (True, None, 1.5)}]
            assert isinstance(lr, torch.Tensor)
            assert lr == torch.tensor(0.1)
