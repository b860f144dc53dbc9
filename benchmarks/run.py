"""Runs benchmarks, one after the other, and writes what they measured into ``benchmarks/results.json``."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from pathlib import Path

import torch

__all__ = ["main"]

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run those named on the command line, or all."""
    names = sys.argv[1:] or sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    sys.path.insert(0, str(HERE.parent))
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}  # of those that do not run now
    results |= {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for name in names:
        print(f"\n== {name} ==", flush=True)
        results[name] = importlib.import_module(f"benchmarks.bench_{name}").main()
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
