"""Measures all cases and kernels on the GPU of this machine: ``python -m benchmarks.on_gpu.main FOLDER``.

Each runs in a process of its own, and writes a line of ``steps.jsonl`` or ``kernels.jsonl`` when it is done;
those of a device become ``steps_DEVICE.jsonl`` here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.cases import CASES
from benchmarks.on_gpu.kernels import MEASURES
from benchmarks.on_gpu.measuring import measured, traced

__all__ = ["main"]

TRACED = (
    "trace llama 0.2B, bf16",
    "trace llama 0.2B, bf16, 64 ranks",
    "trace llama 0.2B, bf16, FSDP1",
    "trace ViT-L, bf16",
)


def main() -> None:
    """Measure what the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="cases and kernels whose name has one of these texts")
    parser.add_argument("--without", nargs="*", default=[], help="names to leave out")
    parser.add_argument("--seconds", type=float, default=60, help="for each")
    options = parser.parse_args()
    import transformers  # noqa: F401 - before the processes fork

    for kind, names in (("traces", TRACED), ("kernels", MEASURES), ("steps", CASES)):
        for name in names:
            if not any(text in name for text in options.only) or any(text in name for text in options.without):
                continue
            begun = time.perf_counter()
            found = _apart(kind, name, options.seconds)
            line = {"name": name, "torch": torch.__version__, **found}
            with (options.folder / f"{kind}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            peak = found.get("peak", {}).get("allocated", 0) / (1 << 30)
            seconds = sorted(found.get("seconds", [0.0]))[len(found.get("seconds", [0.0])) // 2]
            error = found.get("error", "").strip().splitlines()[-1:]
            print(
                f"{name:34} {peak:6.2f} GiB {seconds:7.4f} s  ({time.perf_counter() - begun:.1f} s) {error}", flush=True
            )


def _apart(kind: str, name: str, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, kind, name))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return {"error": f"took more than {seconds} s"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:
        return {"error": "ended"}
    finally:
        process.kill()
        process.join()


def _measure(answer: Connection, kind: str, name: str) -> None:
    try:
        device = torch.cuda.get_device_name()
        if kind == "kernels":
            found = {"rows": MEASURES[name]()}
        else:
            found = measured(CASES[name]) if kind == "steps" else traced(CASES[name.removeprefix("trace ")])
        answer.send({"device": device, **found})
    except BaseException:
        answer.send({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
