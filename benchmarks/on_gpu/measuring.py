"""Measures a step on a GPU: bytes by phase, seconds, and each operator's kernels."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import mmfsdp
from benchmarks.on_gpu.cases import Case
from mmfsdp.rehearsal.running.optimizers import make_optimizer
from mmfsdp.rehearsal.running.step import run_forward, run_step
from mmfsdp.runtime.refusals.guards import unwatched
from mmfsdp.sharding.apply import shard_in_place
from mmfsdp.sharding.device_mesh import build_mesh

__all__ = ["measured", "traced"]

_WARM, _TIMED, _PROFILED = 2, 5, 1
_SMALLEST = 10.0  # microseconds of an operator that is worth a row


class _Phases:
    """Keeps the most bytes of each phase of a step."""

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self._name = ""

    def begin(self, name: str) -> None:
        if self._name:
            kept = self.peaks.setdefault(self._name, {"allocated": 0, "active": 0, "reserved": 0})
            stats = torch.cuda.memory_stats()
            for kind in kept:
                kept[kind] = max(kept[kind], stats[f"{kind}_bytes.all.peak"])
        self._name = name
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def _ready(case: Case) -> Iterator[Any]:
    """Yield a function that takes a step of a case."""
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with _world(case.ranks), unwatched():
        with torch.device("cuda"):
            model = case.model()
        plan = mmfsdp.plan(model, case.settings(), case.ranks)
        model = shard_in_place(model, plan, build_mesh(plan.mesh, "cuda")).module
        optimizer = make_optimizer(case.optimizer, [*model.parameters()], "cuda") if case.train else None
        model.train(case.train)
        batches = [case.tensors("cuda") for _ in range(case.accumulate)]
        gc.collect()
        torch.cuda.empty_cache()

        def step(begin: Any = lambda name: None) -> None:
            if optimizer is None:
                run_forward(begin, model, batches, case.compute)
            else:
                run_step(begin, model, batches, case.compute, optimizer, 1.0)

        yield step


def traced(case: Case) -> dict[str, Any]:
    """Return what the allocator does in three steps: action, address, bytes and stream of each event."""
    with _ready(case) as step:
        before = [
            [part["total_size"], part["stream"], [[block["size"], block["state"]] for block in part["blocks"]]]
            for part in torch.cuda.memory._snapshot()["segments"]
        ]
        torch.cuda.memory._record_memory_history(max_entries=400_000, context=None, stacks="python")
        ends = []
        for _ in range(3):
            step()
            torch.cuda.synchronize()
            ends.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        stats = torch.cuda.memory_stats()
    return {
        "before": before,
        "ends": ends,
        "peak": {kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "active", "reserved")},
        "events": [[item["action"], item.get("addr", 0), item["size"], item.get("stream", 0)] for item in events],
    }


def measured(case: Case) -> dict[str, Any]:
    """Measure a case in this process, which has used no GPU before."""
    torch.cuda.set_device(0)
    free = torch.cuda.mem_get_info()[0]
    with _ready(case) as step:
        found: dict[str, Any] = {"held": torch.cuda.memory_allocated()}
        begun = time.perf_counter()
        for _ in range(_WARM):
            step()
        torch.cuda.synchronize()
        found["warm_seconds"] = time.perf_counter() - begun
        torch.cuda.reset_peak_memory_stats()
        step()
        stats = torch.cuda.memory_stats()
        found["peak"] = {kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "active", "reserved")}
        found["between"] = torch.cuda.memory_allocated()
        phases = _Phases()
        step(phases.begin)
        phases.begin("")
        found["phases"] = phases.peaks
        found["seconds"], found["issued"] = _times(step)
        found["outside"] = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        found["operators"], found["kernels"] = _operators(step)
        found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return found


@contextmanager
def _world(ranks: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        backend = "fake" if ranks > 1 else "cpu:gloo,cuda:nccl"
        store = FakeStore() if ranks > 1 else dist.FileStore(f"{folder}/store", 1)
        device = None if ranks > 1 else torch.device("cuda", 0)
        dist.init_process_group(backend, rank=0, world_size=ranks, store=store, device_id=device)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _times(step: Any) -> tuple[list[float], list[float]]:
    """Return the seconds of steps, and those until the CPU had issued all of each."""
    whole, issued = [], []
    for _ in range(_TIMED):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        issued.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begun)
    return whole, issued


def _operators(step: Any) -> tuple[list[Any], float]:
    """Return name, shapes, calls and seconds on the GPU of each operator, and the seconds of all kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as seen:
        step()
        torch.cuda.synchronize()
    rows, total = [], 0.0
    for item in seen.key_averages(group_by_input_shape=True):
        micro = item.self_device_time_total
        if item.device_type == torch.autograd.DeviceType.CPU:
            total += micro
            if micro >= _SMALLEST:
                rows.append([item.key, _plain(item.input_shapes), item.count, round(micro, 1)])
    return sorted(rows, key=lambda row: -row[3]), total / 1e6


def _plain(shapes: Any) -> Any:
    while shapes and not shapes[-1]:
        shapes = shapes[:-1]
    return [shape if isinstance(shape, list) and math.prod(map(bool, map(str, shape))) else [] for shape in shapes][:4]
