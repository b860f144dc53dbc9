"""Units are gathered on a stream of their own, while the one before them computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.gpu.loops import WRAP, Net
from torch.profiler import ProfilerActivity, profile

import mmfsdp


@pytest.mark.usefixtures("on_cuda")
def test_gathering_overlaps_computing(device: torch.device, tmp_path: Path) -> None:
    model = mmfsdp.shard(Net(2048, 6), {"wrap": WRAP, "precision": "bf16"})
    x = torch.randn(4096, 16, device=device)
    for _ in range(2):
        model(x).float().mean().backward()
        model.zero_grad()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        model(x).float().mean().backward()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    streams: dict[int, list[tuple[float, float]]] = {}
    for event in kernels:
        streams.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    gemms = [event for event in kernels if "gemm" in event["name"] or "nvjet" in event["name"]]
    [computing] = {event["args"]["stream"] for event in gemms}
    others = [span for stream, spans in streams.items() if stream != computing for span in spans]
    assert others, f"everything ran on stream {computing}"
    overlapping = [
        span for span in others if any(span[0] < stop and start < span[1] for start, stop in streams[computing])
    ]
    assert overlapping
