"""Experts that torch computes in one product of groups of rows: any dtype is rehearsed, and its FLOPs are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mmfsdp
from mmfsdp.rehearsal import measure

EXPERTS, WIDTH, ROWS = 4, 32, 256
grouped_mm = getattr(nn.functional, "grouped_mm", None)  # from torch 2.10 on

pytestmark = pytest.mark.skipif(grouped_mm is None, reason="this torch has no grouped_mm")


class Experts(nn.Module):
    """Every expert gets as many rows."""

    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.grouped = grouped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.grouped:
            parts = zip(x.chunk(EXPERTS), self.up, self.down, strict=True)
            return torch.cat([torch.relu(part @ up) @ down for part, up, down in parts])
        assert grouped_mm is not None
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (ROWS // EXPERTS)
        return grouped_mm(torch.relu(grouped_mm(x, self.up, offs=ends)), self.down, offs=ends)


def test_flops_are_those_of_the_experts_one_by_one() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        Experts(grouped=False)(x).mean().backward()
    model = nn.Sequential(nn.Identity(), Experts(grouped=True))
    step = mmfsdp.rehearse({"precision": "fp32"}, model, x)
    assert sum(item.flops for item in step.operators) == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_is_that_of_a_real_step(precision: str) -> None:
    found = measure({"precision": precision}, Experts(grouped=True), torch.randn(ROWS, WIDTH), steps=3, device="cpu")
    assert found.rehearsal.peak.nbytes == pytest.approx(found.peak, rel=0.05)
