"""Checkpoints of a model on a GPU: the background save copies through pinned memory, and every kind loads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.loops import WRAP, Net, losses

import mmfsdp
from mmfsdp.checkpoint import convert, verify
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.writing.background import saver_of


def trained(device: torch.device, config: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mmfsdp.shard(Net(), {"wrap": WRAP, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses(model, device, steps=2, optimizer=optimizer)
    return model, optimizer


@pytest.mark.parametrize("config", [{}, {"engine": "fsdp1"}, {"cpu_offload": True}], ids=str)
@pytest.mark.parametrize("kind", ["full", "local", "sharded"])
def test_resumes_exactly(device: torch.device, tmp_path: Path, kind: Any, config: dict[str, Any]) -> None:
    target = tmp_path / ("saved.pth" if kind == "full" else "saved")
    model, optimizer = trained(device, config)
    mmfsdp.save_checkpoint(target, model, optimizer, kind=kind)
    wanted = losses(model, device, optimizer=optimizer, first=2)
    assert verify(target).ok
    again, fresh = trained(device, config)
    losses(again, device, optimizer=fresh, first=7)
    _, report = mmfsdp.load_checkpoint(target, again, fresh)
    assert report.clean
    assert losses(again, device, optimizer=fresh, first=2) == wanted


def test_background_save_keeps_the_moment(device: torch.device, tmp_path: Path) -> None:
    model, optimizer = trained(device, {})
    wanted = []
    for step in range(3):
        wanted.append({name: value.cpu().clone() for name, value in mmfsdp.model_state_dict(model).items()})
        mmfsdp.save_checkpoint(tmp_path / str(step), model, optimizer, kind="sharded", blocking=False)
        losses(model, device, optimizer=optimizer, first=2 + step, steps=1)
    mmfsdp.save_checkpoint(tmp_path / "last", model, kind="sharded")  # waits for the others
    for step, weights in enumerate(wanted):
        convert(tmp_path / str(step), tmp_path / f"{step}.pth")
        found = torch.load(tmp_path / f"{step}.pth", weights_only=True)["state_dict"]
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in found)


@pytest.mark.usefixtures("on_cuda")
def test_staging_is_pinned_and_reused(device: torch.device) -> None:
    state = find_sharded_model(mmfsdp.shard(Net(512, 4), {"wrap": WRAP}))
    saver = saver_of(state.mesh)
    weight = torch.randn(1 << 20, device=device)
    first = saver.stage({"weight": weight})["weight"]
    assert first.is_pinned()
    assert torch.equal(first, weight.cpu())
    pages = first.data_ptr()
    with torch.no_grad():
        weight.add_(1)
    assert not torch.equal(first, weight.cpu())
    second = saver.stage({"weight": weight})["weight"]
    assert second.data_ptr() == pages
    assert torch.equal(second, weight.cpu())
