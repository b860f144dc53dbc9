"""What a rehearsal predicts is what a GPU allocates, alone and as a rank of a larger world without the others."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.loops import WRAP, Net
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import mmfsdp
from mmfsdp.rehearsal.allocator.device_memory import CUBLAS_LARGE, CUBLAS_SMALL
from mmfsdp.runtime.refusals.guards import unwatched
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


def measured(plan: mmfsdp.ShardPlan) -> tuple[int, int, int]:
    """Return the most bytes that the GPU's allocator handed out, and took, in two steps, and those that it had free.

    Segments that earlier tests left have room that is used first.
    """
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
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return most[0] - before[0], most[1] - before[1], before[1] - before[0]


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
            allocated, reserved, free = measured(step.plan)
    finally:
        dist.destroy_process_group()
    # The allocator hands out cuBLAS's workspaces, too.
    assert 0.95 * (step.peak.nbytes + sum(CUBLAS_SMALL)) <= allocated <= 1.05 * (step.peak.nbytes + sum(CUBLAS_LARGE))
    low, high = step.reserved()
    assert low - free <= reserved <= high


def allocated_by_stream(plan: mmfsdp.ShardPlan) -> list[Counter[int]]:
    """Return the bytes of what the third step allocates on each stream but that of training."""
    torch.cuda.set_device(0)
    model = shard_in_place(Net(WIDTH, DEPTH), plan, build_mesh(plan.mesh, "cuda")).module
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, 16, device="cuda")
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    try:
        for _ in range(3):
            begin = len(torch.cuda.memory._snapshot()["device_traces"][0])
            loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        events = torch.cuda.memory._snapshot()["device_traces"][0][begin:]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for event in events:
        if event["action"] == "alloc" and event["size"] >= LARGE and event["stream"]:
            found[event["stream"]][event["size"]] += 1
    return [*found.values()]


LARGE = 1 << 20  # what is smaller may be a kernel's own


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_streams_are_those_of_the_allocator(engine: str, precision: str) -> None:
    config = {"engine": engine, "wrap": WRAP, "precision": precision}
    step = mmfsdp.rehearse(config, Net(WIDTH, DEPTH), torch.empty(ROWS, 16), mesh=8, loss=loss)
    expected: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for item in step.allocations:
        if item.stream and item.begin and item.nbytes >= LARGE:
            expected[item.stream][-(-item.nbytes // 512) * 512] += 1
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        with unwatched():
            found = allocated_by_stream(step.plan)
    finally:
        dist.destroy_process_group()
    assert sorted(map(sorted, map(Counter.items, found))) == sorted(map(sorted, map(Counter.items, expected.values())))
