"""Runs benchmarks, one after the other, and writes what they measured into ``benchmarks/results.json``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
ON_GPU = ("background", "muon", "overhead", "recording", "saving", "step")
sys.path.insert(0, str(HERE.parent))

from benchmarks.measuring import DEVICE, QUICK  # noqa: E402 - found only now if this file is run by its path


def main(arguments: Sequence[str] = ()) -> None:
    """Run the benchmarks that the command line names, or all.

    A benchmark's own options are those of ``python -m benchmarks.bench_NAME``: here each runs with its defaults.
    """
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description="Run benchmarks and write benchmarks/results.json.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; default: all")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, to see that they run; writes no results")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: one GPU, for some benchmarks; writes its own file",
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    if options.device == "cuda":
        known = [name for name in known if name in ON_GPU]
        if unknown := [name for name in options.names if name not in known]:
            parser.error(f"{unknown[0]!r} does not run on a GPU; {', '.join(known)} do")
        os.environ[DEVICE] = "cuda"
    if options.quick:
        os.environ[QUICK] = "1"
    found = {}
    for name in options.names or known:
        print(f"\n== {name} ==", flush=True)
        found[name] = importlib.import_module(f"benchmarks.bench_{name}").main()
    if not options.quick:
        path = HERE / ("results_cuda.json" if options.device == "cuda" else "results.json")
        kept = json.loads(path.read_text()) if path.exists() else {}  # of benchmarks that did not run now
        system = _gpu() if options.device == "cuda" else {}
        system |= {"torch": version("torch"), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
        path.write_text(json.dumps({**kept, **system, **found}, indent=1) + "\n")


def _gpu() -> dict[str, str]:
    import torch

    return {"device": torch.cuda.get_device_name()}


if __name__ == "__main__":
    main(sys.argv[1:])
