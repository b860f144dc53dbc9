"""What the plan says about memory is what the GPU's allocator counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.loops import WRAP, Net

import mmfsdp
from mmfsdp.planning import estimate_memory

WIDTH, DEPTH = 1024, 8  # 270 MB of parameters, beside which activations of 4 rows are nothing
BLOCK = 512  # bytes that the allocator rounds each tensor up to


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "replicate"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_allocated_bytes(device: torch.device, engine: str, precision: str) -> None:
    config: dict[str, Any] = {"engine": engine, "wrap": WRAP, "precision": precision}
    before = torch.cuda.memory_allocated()
    model = mmfsdp.shard(Net(WIDTH, DEPTH), config)
    estimate = estimate_memory(mmfsdp.plan(Net(WIDTH, DEPTH), config, 1), "adamw", 0)
    tensors = len([*model.parameters(), *model.buffers()])
    held = torch.cuda.memory_allocated() - before
    assert estimate.parameters <= held <= estimate.parameters + 2 * BLOCK * tensors

    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(4, 16, device=device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    assert held + (estimate.optimizer_state or 0) <= peak <= 1.1 * estimate.total


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_sharding_from_meta_holds_little_more_than_the_shards(device: torch.device, engine: str) -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = Net(WIDTH, DEPTH)
    model = mmfsdp.shard(model, {"engine": engine, "wrap": WRAP})
    held = torch.cuda.memory_allocated() - before
    unit = sum(param.numel() * param.element_size() for param in Net(WIDTH, 1).layers.parameters())
    assert torch.cuda.max_memory_allocated() - before <= held + 2 * unit
