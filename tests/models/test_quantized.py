"""A base of 4 bits from bitsandbytes with adapters: a rehearsal knows its scales, its products and what they unpack."""

from __future__ import annotations

import bitsandbytes
import torch
import torch.nn as nn

import mmfsdp
from mmfsdp.testing import run_ranks

WIDTH, ROWS = 256, 512
CONFIG = {"wrap": {"kind": "module_class", "classes": ["Adapted"]}}
SCALES = 4 * (WIDTH * WIDTH // 64)  # bytes


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(WIDTH, WIDTH)
        self.base = bitsandbytes.nn.Linear4bit(
            WIDTH, WIDTH, bias=False, compress_statistics=False, quant_type="nf4", quant_storage=torch.bfloat16
        )
        self.base.weight = bitsandbytes.nn.Params4bit(
            whole, False, compress_statistics=False, quant_type="nf4", quant_storage=torch.bfloat16, module=self.base
        ).to("cpu")
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(3)))


def trained(_: int) -> list[float]:
    sharded = mmfsdp.shard(model(), CONFIG)
    return losses(sharded)


def losses(module: nn.Module) -> list[float]:
    torch.manual_seed(1)
    batch = torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=1e-3)
    found = []
    for _ in range(3):
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_trains_as_in_one_process() -> None:
    found, expected = run_ranks(trained, 2)[0], losses(model())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert expected[2] < expected[0]


def test_a_rehearsal_knows_the_base() -> None:
    step = mmfsdp.rehearse(CONFIG, model(), torch.randn(ROWS, WIDTH), mesh=2, device="a100")
    assert step.static["buffer"] == 3 * SCALES
    products = [item for item in step.operators if item.name == "bitsandbytes::gemm_4bit"]
    assert [item.flops for item in products] == [2 * ROWS * WIDTH * WIDTH] * 3
    unpacked = {held.nbytes for held in step.allocations if held.end == held.begin + 1}
    assert 4 * WIDTH * WIDTH in unpacked
