"""What a rehearsal predicts is what a GPU allocates, alone and as a rank of a larger world without the others."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.loops import WRAP, Net
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import mmfsdp
from mmfsdp.rehearsal.device_memory import CUBLAS_LARGE, CUBLAS_SMALL
from mmfsdp.runtime.guards import unwatched
from mmfsdp.sharding.apply import shard_in_place
from mmfsdp.sharding.device_mesh import build_mesh

WIDTH, DEPTH, ROWS = 2048, 8, 8192  # 1.1 GB of weights in float32, and more of activations

CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "full": {"precision": "bf16", "activation_checkpointing": {"mode": "full"}},
    "offload": {"precision": "bf16", "cpu_offload": True},
}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def measured(plan: mmfsdp.ShardPlan) -> tuple[int, int]:
    """Return the most bytes that the GPU's allocator handed out, and took, in two steps."""
    torch.cuda.set_device(0)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model = shard_in_place(Net(WIDTH, DEPTH), plan, build_mesh(plan.mesh, "cuda")).module
    gc.collect()
    torch.cuda.empty_cache()  # of what sharding needed for a moment
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, 16, device="cuda")
    for _ in range(2):
        loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1]


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("backend", "ranks"), [("cpu:gloo,cuda:nccl", 1), ("fake", 8)])
def test_peaks(name: str, backend: str, ranks: int, tmp_path: Path) -> None:
    config = {"wrap": WRAP, **CONFIGS[name]}
    step = mmfsdp.rehearse(config, Net(WIDTH, DEPTH), torch.empty(ROWS, 16), mesh=ranks, loss=loss)
    # The fake backend sends nothing; kernels, copies and the allocator are real.
    store = FakeStore() if backend == "fake" else dist.FileStore(f"{tmp_path}/store", ranks)
    dist.init_process_group(backend, rank=0, world_size=ranks, store=store)
    try:
        with unwatched():  # shard() and the guards need other ranks
            allocated, reserved = measured(step.plan)
    finally:
        dist.destroy_process_group()
    # The allocator hands out cuBLAS's workspaces, too.
    assert 0.95 * (step.peak.nbytes + sum(CUBLAS_SMALL)) <= allocated <= 1.05 * (step.peak.nbytes + sum(CUBLAS_LARGE))
    low, high = step.reserved()
    assert low <= reserved <= high
