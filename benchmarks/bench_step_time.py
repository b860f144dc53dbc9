"""How well the time of a step is predicted: ten families on 1 and 2 ranks of the CPU, calibrated, in one thread.

Times are those of the processor (`time.process_time`), so that other processes disturb less. Calibration and steps take
turns, because a busy machine slows both.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from tests.distributed.families import FAMILIES, make
from tests.distributed.measured import optimizer_of

import mmfsdp
from benchmarks.measuring import sized
from mmfsdp.rehearsal import Links, calibrate, measure_links, phase_seconds
from mmfsdp.testing import run_ranks

__all__ = ["main"]

SAMPLES, STEPS, ROUNDS, RANKS = 8, sized(8, 3), sized(2, 1), sized((1, 2), (2,))
NAMES = sized(tuple(FAMILIES), ("vit",))


def main() -> dict[str, Any]:
    """Measure, print the table of errors, and return it."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for ranks in RANKS:
        links = run_ranks(_links, ranks, timeout=300)[0] if ranks > 1 else None
        rows = {}
        for name in NAMES:
            predicted, measured = _compared(name, ranks, links)
            error = predicted / measured - 1
            rows[name] = {"predicted": round(predicted, 5), "measured": round(measured, 5), "error": round(error, 3)}
            print(f"{name:10} {ranks} ranks: {predicted * 1e3:7.1f} ms, really {measured * 1e3:7.1f} ms, {error:+.1%}")
        errors = [abs(row["error"]) for row in rows.values()]
        summary = {"median": statistics.median(errors), "worst": max(errors)}
        print(f"{ranks} ranks: median error {summary['median']:.1%}, worst {summary['worst']:.1%}", flush=True)
        found[f"{ranks} ranks"] = {**rows, **summary}
    return found


def _compared(name: str, ranks: int, links: Links | None) -> tuple[float, float]:
    """Return the seconds of a step, predicted and measured."""
    case = FAMILIES[name]
    step = mmfsdp.rehearse(
        _config(name), make(name), case.batch(SAMPLES), mesh=ranks, loss=case.loss, optimizer=optimizer_of,
        max_norm=1.0, device_type="cpu",
    )  # fmt: skip
    predicted, measured = [], []
    for _ in range(ROUNDS):
        predicted.append(step.time(calibrate(step, clock=time.process_time, links=links)).seconds)
        measured += run_ranks(_steps, ranks, name, timeout=300)[0][1:]
    return statistics.mean(predicted), statistics.median(measured)


def _config(name: str) -> dict[str, Any]:
    return {"wrap": {"kind": "module_class", "classes": list(FAMILIES[name].layer)}}


def _links(rank: int) -> Links:
    torch.set_num_threads(1)
    return measure_links(time.process_time)


def _steps(rank: int, name: str) -> list[float]:
    """Return the seconds of real steps. Collective."""
    torch.set_num_threads(1)
    case = FAMILIES[name]
    model = mmfsdp.shard(make(name), _config(name))
    optimizer = optimizer_of(model.parameters())
    batches = [case.batch(SAMPLES)]
    found = phase_seconds(model, optimizer, batches, case.loss, 1.0, time.process_time, STEPS)
    return [sum(phases.values()) for phases in found]


if __name__ == "__main__":
    main()
