"""Units are gathered on a stream of their own, while the one before them computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.loops import WRAP, Net
from tests.gpu.ranks import run
from torch.profiler import ProfilerActivity, profile

import mmfsdp


def traced(rank: int, device: torch.device, folder: str) -> list[dict[str, Any]]:
    """Return the kernels of a step on this rank: one rank alone gathers nothing."""
    model = mmfsdp.shard(Net(2048, 6), {"wrap": WRAP, "precision": "bf16"})
    x = torch.randn(4096, 16, device=device)
    for _ in range(2):
        model(x).float().mean().backward()
        model.zero_grad()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        model(x).float().mean().backward()
        torch.cuda.synchronize()
    path = Path(folder) / f"trace-{rank}.json"
    seen.export_chrome_trace(str(path))
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]


@pytest.mark.usefixtures("on_cuda")
def test_gathering_overlaps_computing(tmp_path: Path) -> None:
    for kernels in run(traced, 2, str(tmp_path)):
        products = [event for event in kernels if "gemm" in event["name"] or "nvjet" in event["name"]]
        gathers = [event for event in kernels if "AllGather" in event["name"]]
        [computing] = {event["args"]["stream"] for event in products}
        assert gathers, {event["name"] for event in kernels}
        assert computing not in {event["args"]["stream"] for event in gathers}
        assert any(_overlap(gather, product) for gather in gathers for product in products)


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"])
