"""A watch writes a record of the steps around a jump or an infinite number, and names the tensor where it began."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn as nn

import mmfsdp
from mmfsdp.errors import ConfigError


def train(folder: Path, fault: int = -1, value: float = 0.0, *, steps: int = 40, every: int = 2) -> list[str]:
    """Train, with another weight of the layer in the middle in the step of the fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with mmfsdp.watching(folder, model, optimizer, every=every) as watch:
        for step in range(steps):
            if step == fault:
                spoil(model, value)
            else:
                model(torch.randn(16, 8)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return watch.alarms


def spoil(model: nn.Module, value: float) -> None:
    held = model[2].weight.detach().clone()
    with torch.no_grad():
        model[2].weight[0, 0] = value
    model(torch.randn(16, 8)).square().mean().mul(1e3).backward()
    with torch.no_grad():
        model[2].weight.copy_(held)


def test_a_jump_of_the_norm(tmp_path: Path) -> None:
    [alarm] = train(tmp_path, fault=20, value=1e4)
    assert alarm.startswith("The norm of step 20 is ")
    assert "it began at output of 2 (step 20)" in alarm
    steps = {item.key.step for item in mmfsdp.compare(tmp_path / "step_000020", tmp_path / "step_000020").compared}
    assert steps == {14, 16, 18, 20, 21, 22, 23, 24}


def test_between_recorded_steps(tmp_path: Path) -> None:
    [alarm] = train(tmp_path, fault=23, value=1e4, every=10)
    assert alarm.startswith("The norm of step 23 is ")
    assert (tmp_path / "step_000030").exists()


def test_not_finite(tmp_path: Path) -> None:
    [alarm] = train(tmp_path, fault=20, value=float("nan"))
    assert "On rank 0, output of 2 (step 20) is the first with infinite or NaN elements" in alarm, alarm


def test_nothing_wrong(tmp_path: Path) -> None:
    assert train(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def scaled(folder: Path, factor: float) -> tuple[list[str], float]:
    """Train with a gradient scaler that begins too high."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with mmfsdp.watching(folder, model, optimizer, every=1) as watch:
        for _ in range(40):
            scaler.scale(model(torch.randn(16, 8) * factor).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return watch.alarms, scaler.get_scale()


def test_steps_that_a_gradient_scaler_skips(tmp_path: Path) -> None:
    """Some are usual at first; if all are skipped, something is wrong."""
    alarms, scale = scaled(tmp_path / "a", 10.0)
    assert alarms == []
    assert scale < 2.0**126
    [alarm] = scaled(tmp_path / "b", float("nan"))[0]
    assert "input of [0][0] (step 0) is the first with infinite or NaN elements" in alarm
    [record] = (tmp_path / "b").iterdir()
    assert {item.key.step for item in mmfsdp.compare(record, record).compared} == {0, 1, 2, 3, 4}


def test_bad_arguments(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with (
        pytest.raises(ConfigError, match="keep=1"),
        mmfsdp.watching(tmp_path, model, torch.optim.SGD(model.parameters()), keep=1),
    ):
        pass
