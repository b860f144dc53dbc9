"""Forecasts the steps that were measured on GPUs, without one, for docs/appendix/measured_on_gpu.md.

``python -m benchmarks.on_gpu.main FOLDER`` measures, on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tools.measured_on_gpu import DATA, DEVICES, FORECASTS, KINDS, error_of, measured

import mmfsdp
from benchmarks.measuring import sized
from benchmarks.on_gpu import short_of_memory
from benchmarks.on_gpu.cases import CASES, Case
from mmfsdp.rehearsal import Rehearsal

__all__ = ["figures_of", "forecast", "main"]

_GIB = 1 << 30


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Forecast the cases and return median and worst errors; ``arguments`` are the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=sized("", "ResNet-50, fp32"), help="cases whose name has this text")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {device: {} for device in DEVICES}
    summary: dict[str, Any] = {}
    for device in DEVICES:
        errors = []
        for name, real in measured(device).items():
            if options.only in name:
                found[device][name] = figures_of(forecast(CASES[name], device))
                errors.append({kind: error_of(kind, real, found[device][name]) for kind in KINDS})
                shown = (f"{kind} {off:+.1%}" for kind, off in errors[-1].items() if off is not None)
                print(f"{device} {name:34} {', '.join(shown)}", flush=True)
        for kind in KINDS:
            if sizes := [abs(off) for row in errors if (off := row[kind]) is not None]:
                figures = {"median": statistics.median(sizes), "worst": max(sizes), "count": len(sizes)}
                summary[f"{kind} {device}"] = figures
                print(f"{kind}, {device}: median {figures['median']:.1%}, worst {max(sizes):.1%} of {len(sizes)}")
    if not options.only:
        every = {**found, "short_of_memory": short_of_memory.forecasts()}
        (DATA / FORECASTS).write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    return summary


def forecast(case: Case, device: str = "h100") -> Rehearsal:
    """Rehearse a case as it was measured: without TensorFloat32."""
    with torch.device("meta"):
        model = case.model()
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        return mmfsdp.rehearse(
            case.settings(),
            model,
            case.tensors("meta"),
            mesh=case.ranks,
            loss=case.compute,
            optimizer=case.optimizer if case.train else None,
            max_norm=1.0 if case.train else None,
            accumulate=case.accumulate,
            device=device,
            train=case.train,
        )
    finally:
        torch.backends.cudnn.allow_tf32 = before


def figures_of(step: Rehearsal) -> dict[str, list[float]]:
    """Return the least and the most that is forecast, of memory in GiB, of time in seconds with the usual one last."""
    time = step.time()
    return {
        "allocated": [round(size / _GIB, 3) for size in step.allocated()],
        "reserved": [round(size / _GIB, 3) for size in step.reserved()],
        "seconds": [float(f"{seconds:.4g}") for seconds in (time.low, time.high, time.seconds)],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
