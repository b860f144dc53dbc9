"""Parameters keep the unsharded model's order, so that optimizer states by position mean the same parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.testing import run_ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "replicate": {"sharding": "NO_SHARD"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-flat": {"sharding": {"use_orig_params": False}},
    "fsdp1-replicated": {"engine": "fsdp1", "sharding": "NO_SHARD"},
    "fsdp1-ignored": {"engine": "fsdp1", "sharding": {"ignored_parameters": ["*.two"]}},
}
FORMS = ("one group", "groups")
KINDS = (("full", ".pth"), ("local", ""), ("sharded", ""))


class Part(nn.Module):
    """One module registers parameters of every kind, those that no flat parameter can hold between others.

    Args:
        frozen: Whether some are not trained.
    """

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.two = nn.Parameter(torch.randn(2, 3))
        self.fixed_empty = nn.Parameter(torch.zeros(0, 2), requires_grad=not frozen)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.randn(2, 3), requires_grad=not frozen)
        self.other = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.two.T @ self.other * self.tiny + self.scalar
        return x + self.fixed.sum() + self.empty.sum() + self.fixed_empty.sum()


class Model(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.block, self.head = Part(frozen), Part(frozen), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.part(x)))


def forms_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Both with each engine; other strategies of an engine order parameters as its first one does."""
    return FORMS[:1] if "sharding" in config else FORMS


def is_flat(config: dict[str, Any]) -> bool:
    return config.get("sharding") == {"use_orig_params": False}


def plain_model(config: dict[str, Any]) -> nn.Module:
    return Model(frozen=not is_flat(config))  # a flat parameter is trained as a whole


def sharded_model(config: dict[str, Any]) -> nn.Module:
    return mmfsdp.shard(plain_model(config), {"wrap": {"kind": "module_class", "classes": "Part"}, **config})


def optimizer_of(model: nn.Module, form: str) -> torch.optim.Optimizer:
    params = [*model.parameters()]
    if form == "groups":
        return torch.optim.AdamW([{"params": params[:3], "lr": 2e-2}, {"params": params[3:]}], lr=1e-2)
    return torch.optim.AdamW(params, lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare states of plain optimizers; what has no elements may have a state or none."""
    for place in found["state"].keys() | wanted["state"].keys():
        one, two = found["state"].get(place), wanted["state"].get(place)
        if one is None or two is None:  # FSDP1 gives zeros to what got no gradient
            assert not (one or two)["exp_avg"].any(), place  # type: ignore[index]
            continue
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)
    assert [group["params"] for group in found["param_groups"]] == [group["params"] for group in wanted["param_groups"]]


def both_ways(rank: int, config: dict[str, Any], folder: str) -> None:
    for form in forms_of(config):
        plain, model = plain_model(config), sharded_model(config)
        one, optimizer = optimizer_of(plain, form), optimizer_of(model, form)
        for seed in range(2):
            step(plain, one, seed)
            step(model, optimizer, seed)
        wanted = copy.deepcopy(one.state_dict())
        same(mmfsdp.optim_state_dict(model, optimizer, rank0_only=False), wanted)
        named = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False, by_name=True)
        names = [name for group in named["param_groups"] for name in group["params"]]
        assert names == [name for name, _ in plain.named_parameters()]
        # An optimizer that is built after a step, and gets the plain one's state.
        again = optimizer_of(model, form)
        mmfsdp.load_optim_state_dict(model, again, wanted)
        step(plain, one, 2)
        step(model, again, 2)
        wanted = copy.deepcopy(one.state_dict())
        same(mmfsdp.optim_state_dict(model, again, rank0_only=False), wanted)
        for saved, suffix in KINDS if form == FORMS[0] else KINDS[1:2]:
            mmfsdp.save_checkpoint(f"{folder}/{form} {saved}{suffix}", model, again, kind=saved)
        if rank == 0:
            torch.save({"state_dict": plain.state_dict(), "optimizer": wanted}, f"{folder}/{form} wanted.pth")


def load(rank: int, config: dict[str, Any], folder: str) -> None:
    for form in forms_of(config):
        wanted = torch.load(f"{folder}/{form} wanted.pth", weights_only=True)
        for saved in ("full.pth", "local", "sharded", "wanted.pth") if form == FORMS[0] else ("local", "wanted.pth"):
            model = sharded_model(config)
            optimizer = optimizer_of(model, form)
            mmfsdp.load_checkpoint(f"{folder}/{form} {saved}", model, optimizer)
            same(mmfsdp.optim_state_dict(model, optimizer, rank0_only=False), wanted["optimizer"])
            for name, value in mmfsdp.model_state_dict(model, rank0_only=False).items():
                torch.testing.assert_close(value, wanted["state_dict"][name], rtol=1e-4, atol=1e-6)


@pytest.mark.sample("fsdp1-flat")
@pytest.mark.parametrize("case", CONFIGS)
def test_positions_are_those_of_the_unsharded_model(case: str, tmp_path: Path) -> None:
    config = CONFIGS[case]
    run_ranks(both_ways, 2, config, str(tmp_path))
    run_ranks(load, 3, config, str(tmp_path))
    # The plain optimizer takes the file that the ranks have written.
    plain = plain_model(config)
    optimizer = optimizer_of(plain, FORMS[0])
    optimizer.load_state_dict(torch.load(tmp_path / "one group full.pth", weights_only=True)["optimizer"])
    step(plain, optimizer, 3)
