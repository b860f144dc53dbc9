"""How far rehearsed peaks are from what real ranks allocate: 24 families, precisions, checkpointing, accumulation."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

from tests.distributed.measured import CASES, SETTINGS, measure, rehearsed

from benchmarks.measuring import sized
from mmfsdp.testing import run_ranks

__all__ = ["main"]

_Case = tuple[dict[str, Any], int]


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Compare and return the relative error of each case; ``arguments`` are the command line's, without the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--families", nargs="+", default=sized([*CASES], ["llama"]), choices=[*CASES])
    options = parser.parse_args(arguments)
    found: dict[str, float] = {}
    by_family: dict[str, dict[str, list[float]]] = {}
    for family in options.families:
        by_family[family] = defaultdict(list)
        cases = [*product(("fp32", "bf16"), SETTINGS, (1, 2))][: sized(None, 2)]
        settings = [(config_of(family, precision, kind), count) for precision, kind, count in cases]
        peaks = run_ranks(peaks_of, options.ranks, family, settings, options.samples, timeout=600)[0]
        for (precision, kind, count), (config, _), peak in zip(cases, settings, peaks, strict=True):
            error = rehearsed(family, config, options.samples, count, options.ranks).peak.nbytes / peak - 1
            found[f"{family} {precision} {kind} {count}"] = error
            by_family[family][precision].append(error)
            by_family[family][kind].append(error)
        row = "  ".join(f"{kind} {_worst(errors):+.2%}" for kind, errors in by_family[family].items())
        print(f"{family:10} {row}", flush=True)
    sizes = [abs(error) for error in found.values()]
    print(f"median {statistics.median(sizes):.2%}, worst {max(sizes):.2%} of {len(sizes)} cases")
    return {"errors": found, "median": statistics.median(sizes), "worst": max(sizes)}


def config_of(family: str, precision: str, activations: str) -> dict[str, Any]:
    """Return the config of a case."""
    wrap = {"kind": "module_class", "classes": [*CASES[family].layer]}
    return {"precision": precision, "wrap": wrap, **SETTINGS[activations]}


def peaks_of(rank: int, family: str, settings: list[_Case], samples: int) -> list[int]:
    """Return the peak bytes of this rank of a real step of each case."""
    return [measure(rank, family, config, samples, count)[0] for config, count in settings]


def _worst(errors: list[float]) -> float:
    return max(errors, key=abs)


if __name__ == "__main__":
    main(sys.argv[1:])
