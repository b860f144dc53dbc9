"""A run that leaves its forecast: unit, collective, bytes and rank are named on all ranks, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal import ForecastWatch
from mmfsdp.testing import run_ranks

WIDTH, RANKS = 64, 2
CONFIG = {"wrap": {"kind": "module_class", "classes": ["Block"]}}


class Block(nn.Module):
    """One layer, whose forward takes seconds of a clock of the test's own: the machine may be busy."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = 0.02

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.now += self.seconds
        return x + self.linear(x)


def watched(rank: int, change: str) -> list[list[str]]:
    """Train three windows as rehearsed, and three with a change; return what is said at the end of each."""
    net, batch = nn.Sequential(*(Block() for _ in range(3))), torch.randn(8, WIDTH)
    optimizer_name = "sgd-momentum" if change == "optimizer" else "adamw"
    device = "h100" if change == "slow" else None
    step = mmfsdp.rehearse(CONFIG, net, batch, mesh=RANKS, optimizer=optimizer_name, device_type="cpu")
    model = mmfsdp.shard(net, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = ForecastWatch(step, model, optimizer, device=device, every=2, clock=lambda: Block.now)
    said = []
    for number in range(14):
        if number == 8:
            model[1].seconds = 0.04 if change == "rank" and rank == 1 else 0.02
        out = model(batch)
        if change == "forward" and number >= 8:
            out = out + model[1](batch)
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lines = watch.step()
        if number >= 2 and number % 2:
            said.append(lines)
        else:
            assert not lines
    return said


@pytest.mark.sample("rank-before1-after1")
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("forward", [], ["all_gather of 1: 3 in a step, 2 in the forecast, which is 16.25 KiB more."]),
        ("rank", [], ["Rank 1 of 2 computes 80 ms in a step, the fastest 60 ms; most of it in 1."]),
        ("optimizer", ["optimizer state: 48.77 KiB here, 24.38 KiB in the forecast."], []),
        ("slow", ["A step takes 60 ms, ", "most is lost in computing of 0: 20 ms, "], []),
    ],
)
def test_what_leaves_the_forecast_is_named_once(change: str, before: list[str], after: list[str]) -> None:
    for found in run_ranks(watched, RANKS, change):
        assert len(found) == 6
        for lines, parts in ((found[0], before), (found[3], after)):
            assert len(lines) == bool(parts), found
            assert all(part in lines[0] for part in parts), found
        assert not any(lines for place, lines in enumerate(found) if place not in (0, 3)), found


def wrong(rank: int) -> None:
    net = nn.Linear(4, 4)
    step: Any = mmfsdp.rehearse(None, net, torch.randn(2, 4), device_type="cpu")
    model = mmfsdp.shard(net, None)
    with pytest.raises(ConfigError, match="at least 2 steps, got 1"):
        ForecastWatch(step, model, every=1)
    with pytest.raises(ConfigError, match=r"a share such as 0.1, got -1"):
        ForecastWatch(step, model, tolerance=-1)


def test_settings_out_of_their_range() -> None:
    run_ranks(wrong, 1)
