"""Forecasts steps that were measured on a GPU, without one: `benchmarks.on_gpu`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmfsdp
from benchmarks.measuring import sized
from benchmarks.on_gpu.cases import CASES, Case
from mmfsdp.rehearsal import Rehearsal

__all__ = ["MEASURED", "forecast", "main"]

MEASURED = Path(__file__).parent / "on_gpu" / "steps.jsonl"
_GIB = 1 << 30


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Forecast the cases and return errors; ``arguments`` are the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=sized("", "LSTM 1024 x 2, fp32"), help="cases whose name has this text")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measured = {}
    if MEASURED.exists():
        measured = {line["name"]: line for line in map(json.loads, MEASURED.read_text().splitlines())}
    for name, case in CASES.items():
        if options.only in name:
            step = forecast(case)
            time = step.time()
            print(f"{name:34} {step.allocated()[1] / _GIB:6.2f} GiB {time.seconds:7.4f} s", end=" ")
            if name in measured and "peak" in measured[name]:
                found = measured[name]
                real = found["peak"]["allocated"]
                low, high = (size / real - 1 for size in step.allocated())
                seconds = statistics.median(found["seconds"])
                print(
                    f"measured {real / _GIB:6.2f} ({low:+.1%} {high:+.1%}), {seconds:.4f} s ({time.seconds / seconds - 1:+.1%})",
                    end="",
                )
            print(flush=True)
    return {}


def forecast(case: Case, device: str = "h100") -> Rehearsal:
    """Rehearse a case."""
    with torch.device("meta"):
        model = case.model()
    return mmfsdp.rehearse(
        case.settings(),
        model,
        case.tensors("meta"),
        mesh=case.ranks,
        loss=case.compute,
        optimizer=case.optimizer,
        max_norm=1.0,
        accumulate=case.accumulate,
        device=device,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
