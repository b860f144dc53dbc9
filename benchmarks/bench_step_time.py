"""How well the time of a step is predicted: ten families on 1 and 2 ranks of the CPU, calibrated, in one thread.

Times are those of the processor (`time.process_time`), so that other processes disturb less. All ranks calibrate at
once, because they slow each other. Two threads of one core halve each other's speed from one second to the next, so
calibration and steps take turns, and the error is the median of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from tests.distributed.families import FAMILIES, make
from tests.distributed.measured import optimizer_of

from benchmarks.measuring import sized
from mmfsdp.rehearsal import measure
from mmfsdp.testing import run_ranks

__all__ = ["main"]

SAMPLES, STEPS, ROUNDS = 8, sized(8, 3), sized(5, 1)


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure, print the table of errors, and return it; ``arguments`` are the command line's, without the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=sized([1, 2], [1]))
    parser.add_argument("--families", nargs="+", default=sized([*FAMILIES], ["vit"]), choices=[*FAMILIES])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for ranks in options.ranks:
        rows = {}
        for name in options.families:
            rounds = [run_ranks(_measured, ranks, name, timeout=300)[0] for _ in range(ROUNDS)]
            predicted, measured = (statistics.median(column) for column in zip(*rounds, strict=True))
            errors = sorted(one / other - 1 for one, other in rounds)
            error = statistics.median(errors)
            rows[name] = {"predicted": round(predicted, 5), "measured": round(measured, 5), "error": round(error, 3)}
            print(
                f"{name:10} {ranks} ranks: {predicted * 1e3:7.1f} ms, really {measured * 1e3:7.1f} ms, {error:+.1%} "
                f"({errors[0]:+.1%} to {errors[-1]:+.1%})",
                flush=True,
            )
        errors = [abs(row["error"]) for row in rows.values()]
        summary = {"median": statistics.median(errors), "worst": max(errors)}
        print(f"{ranks} ranks: median error {summary['median']:.1%}, worst {summary['worst']:.1%}", flush=True)
        found[f"{ranks} ranks"] = {**rows, **summary}
    return found


def _measured(rank: int, name: str) -> tuple[float, float]:
    """Return the seconds of a step, predicted and measured. Collective."""
    torch.set_num_threads(1)
    case = FAMILIES[name]
    config = {"wrap": {"kind": "module_class", "classes": list(case.layer)}}
    found = measure(
        config, make(name), case.batch(SAMPLES), loss=case.loss, optimizer=optimizer_of, max_norm=1.0,
        steps=STEPS, clock=time.process_time, budget=sized(0.01, 1e-3),
    )  # fmt: skip
    return found.predicted.seconds, found.seconds


if __name__ == "__main__":
    main(sys.argv[1:])
