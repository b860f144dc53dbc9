"""How well the time of a step is predicted: ten families on 1 and 2 ranks of the CPU, calibrated, in one thread.

Times are those of the processor (`time.process_time`), so that other processes disturb less. All ranks calibrate at
once, because they slow each other; calibration and steps take turns, because a busy machine slows both.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from tests.distributed.families import FAMILIES, make
from tests.distributed.measured import optimizer_of

from benchmarks.measuring import sized
from mmfsdp.rehearsal import measure
from mmfsdp.testing import run_ranks

__all__ = ["main"]

SAMPLES, STEPS, ROUNDS, RANKS = 8, sized(8, 3), sized(2, 1), sized((1, 2), (2,))
NAMES = sized(tuple(FAMILIES), ("vit",))


def main() -> dict[str, Any]:
    """Measure, print the table of errors, and return it."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for ranks in RANKS:
        rows = {}
        for name in NAMES:
            predicted, measured = _compared(name, ranks)
            error = predicted / measured - 1
            rows[name] = {"predicted": round(predicted, 5), "measured": round(measured, 5), "error": round(error, 3)}
            print(f"{name:10} {ranks} ranks: {predicted * 1e3:7.1f} ms, really {measured * 1e3:7.1f} ms, {error:+.1%}")
        errors = [abs(row["error"]) for row in rows.values()]
        summary = {"median": statistics.median(errors), "worst": max(errors)}
        print(f"{ranks} ranks: median error {summary['median']:.1%}, worst {summary['worst']:.1%}", flush=True)
        found[f"{ranks} ranks"] = {**rows, **summary}
    return found


def _compared(name: str, ranks: int) -> tuple[float, float]:
    """Return the seconds of a step, predicted and measured: means over rounds."""
    rounds = [run_ranks(_measured, ranks, name, timeout=300)[0] for _ in range(ROUNDS)]
    predicted, measured = (statistics.mean(column) for column in zip(*rounds, strict=True))
    return predicted, measured


def _measured(rank: int, name: str) -> tuple[float, float]:
    """Return the same on a rank. Collective."""
    torch.set_num_threads(1)
    case = FAMILIES[name]
    config = {"wrap": {"kind": "module_class", "classes": list(case.layer)}}
    found = measure(
        config, make(name), case.batch(SAMPLES), loss=case.loss, optimizer=optimizer_of, max_norm=1.0,
        steps=STEPS, clock=time.process_time,
    )  # fmt: skip
    return found.predicted.seconds, found.seconds


if __name__ == "__main__":
    main()
