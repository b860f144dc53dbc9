"""Saved optimizer state knows the names of its parameters: whatever order they were given in, it finds them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.testing import run_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))


def optimizer_of(model: nn.Module, *, backwards: bool = False, lr: float = 0.1) -> torch.optim.Optimizer:
    params = dict(model.named_parameters())
    matrices = [param for name, param in params.items() if name.endswith("weight") and "1." not in name]
    others = [param for name, param in params.items() if not any(param is one for one in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others}]
    if backwards:
        groups = [{**group, "params": group["params"][::-1]} for group in groups]
    return torch.optim.AdamW(groups, lr=lr)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(12.0).reshape(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(rank: int, folder: Path, engine: str) -> dict[str, Any]:
    model = mmfsdp.shard(build(), {"engine": engine})
    optimizer = optimizer_of(model)
    step(model, optimizer)
    mmfsdp.save_checkpoint(folder / "local", model, optimizer, kind="local")
    mmfsdp.save_checkpoint(folder / "full.pth", model, optimizer, kind="full")
    return mmfsdp.optim_state_dict(model, optimizer, by_name=True)


def load(rank: int, path: Path, engine: str) -> dict[str, Any]:
    model = mmfsdp.shard(build(), {"engine": engine})
    optimizer = optimizer_of(model, backwards=True, lr=5.0)
    mmfsdp.load_checkpoint(path, model, optimizer)
    assert not any("param_names" in group for group in optimizer.param_groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    return mmfsdp.optim_state_dict(model, optimizer, by_name=True)


@pytest.mark.sample("fsdp1")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_another_order_and_another_format(tmp_path: Path, engine: str) -> None:
    saved, _ = run_ranks(save, 2, tmp_path, engine)
    for name in ("local", "full.pth"):
        loaded, _ = run_ranks(load, 2, tmp_path / name, engine)
        torch.testing.assert_close(loaded["state"], saved["state"], rtol=0, atol=0)
        report = convert(tmp_path / name, tmp_path / f"dcp_of_{Path(name).stem}", to="dcp", ranks=3)
        assert report.notes == ()  # nothing had to be guessed
        for parameter, entries in saved["state"].items():
            wanted = {f"optimizer/state/{parameter}/{key}": value for key, value in entries.items()}
            content = {key.replace("/", "."): torch.zeros_like(value) for key, value in wanted.items()}
            with pytest.warns(UserWarning, match="single process"):
                dcp.load(content, checkpoint_id=tmp_path / f"dcp_of_{Path(name).stem}")
            for key, value in wanted.items():
                assert torch.equal(content[key.replace("/", ".")], value), key
    # Plain PyTorch loads it as any state of its own, names or not.
    content = torch.load(tmp_path / "full.pth", weights_only=True)
    model = build()
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(content["optimizer"])
    names = {id(param): name for name, param in model.named_parameters()}
    for param, entries in optimizer.state.items():
        torch.testing.assert_close(entries, saved["state"][names[id(param)]], rtol=0, atol=0)
    assert "optimizer/state/0/exp_avg" in open_layout(tmp_path / "full.pth").tensors
