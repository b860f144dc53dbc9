"""Forecasts runs on GPUs that others published, and writes them beside the figures for docs/appendix/published_runs.md.

Half of the runs fit the shares of the peaks in `mmfsdp.rehearsal.timing.device_presets`, the other half test them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tools.published_runs import error_of

from benchmarks.measuring import sized
from benchmarks.published.forecasting import memory_of, retries_of, seconds_of
from benchmarks.published.rebuilding import Rebuilt, UnknownRunError, published_memory, rebuild, runs

__all__ = ["FORECASTS", "forecast", "half_of", "main"]

FORECASTS = Path(__file__).parent / "published" / "forecasts.json"
"""What the last run over all records wrote: the number of each record, its figures, and their forecasts."""

_MEMORY = ("allocated", "active", "reserved")


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Forecast the runs that can be rebuilt, and return errors; ``arguments`` are the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=sized("", "MPT-125m a100_80gb 8 512 "), help="runs whose line has this text")
    parser.add_argument("--cache", type=Path, help="a folder that keeps rehearsals, to change constants without them")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found, refused = [], {}
    for number, run in enumerate(runs()):
        line = f"{number} {run['model']} {run['gpu']} {run['num_gpus']} {run['seq_len']} {run['framework']}"
        if options.only not in line:
            continue
        try:
            row = forecast(number, run, rebuild(run), options.cache)
        except UnknownRunError as error:
            refused[number] = str(error)
            continue
        found.append(row)
        print(f"{line}: {_shown(row)}", flush=True)
    if not options.only:
        FORECASTS.write_text(json.dumps({"runs": found, "refused": refused}, indent=1) + "\n", encoding="utf-8")
    return summary(found)


def forecast(number: int, run: Mapping[str, Any], built: Rebuilt, cache: Path | None = None) -> dict[str, Any]:
    """Return the figures of a record with their forecasts: bytes in GiB, seconds of a step, and `retries_of`."""
    row: dict[str, Any] = {"run": number, "half": half_of(run)}
    published = published_memory(run)
    if published:
        memory = memory_of(built, cache)
        for kind, gib in published.items():
            low, high = getattr(memory, kind)
            row[kind.replace("expandable", "reserved")] = [round(value, 2) for value in (gib, low, high)]
    if run["tokens_per_s_per_gpu"]:
        seconds = seconds_of(built, cache)
        real = built.samples * built.rows * built.accumulate / run["tokens_per_s_per_gpu"]
        row["seconds"] = [float(f"{value:.4g}") for value in (real, seconds.low, seconds.high, seconds.usual)]
        if not published and (retries := retries_of(built, cache)):
            row["retries"] = retries
    return row


def half_of(run: Mapping[str, Any]) -> str:
    """Return ``fit`` for runs that constants are fitted to, and ``test`` for the others, by a checksum."""
    name = f"{run['source']} {run['model']} {run['num_gpus']} {run['seq_len']} {run['micro_batch']}"
    return ("fit", "test")[zlib.crc32(name.encode()) % 2]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return errors of the forecasts by what was forecast, for each half, and how many intervals have the figure."""
    found = {}
    for half in ("fit", "test"):
        for kind in ("seconds", *_MEMORY):
            figures = [row[kind] for row in rows if kind in row and row["half"] == half]
            if figures:
                errors = [abs(error_of(kind, figure)) for figure in figures]
                inside = sum(low <= real <= high for real, low, high, *_ in figures)
                widest = max(high / low for _, low, high, *_ in figures)
                found[f"{kind}, {half}"] = {
                    "count": len(figures),
                    "median": statistics.median(errors),
                    "worst": max(errors),
                    "inside": inside,
                    "widest": widest,
                }
    for name, figure in found.items():
        print(f"{name}: {figure}")
    return found


def _shown(row: Mapping[str, Any]) -> str:
    parts = [
        f"{kind} {row[kind][0]:.4g}, forecast {row[kind][-1]:.4g} ({error_of(kind, row[kind]):+.1%})"
        for kind in ("seconds", *_MEMORY)
        if kind in row
    ]
    return "; ".join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
