"""Writes docs/appendix/measured_on_gpu.md: steps that were measured on GPUs beside their forecasts.

``python tools/measured_on_gpu.py`` reads benchmarks/on_gpu/steps_DEVICE.jsonl and what
``python -m benchmarks.bench_on_gpu`` has forecast for them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

__all__ = [
    "DATA",
    "DEVICES",
    "FORECASTS",
    "KINDS",
    "PAGE",
    "error_of",
    "measured",
    "measured_with_little_memory",
    "page",
]

ROOT = Path(__file__).parents[1]
DATA = ROOT / "benchmarks" / "on_gpu"
DEVICES = "h100", "h200"
FORECASTS = "forecasts.json"
PAGE = ROOT / "docs" / "appendix" / "measured_on_gpu.md"

_GIB = 1 << 30
KINDS = {"allocated": "allocated memory", "reserved": "reserved memory", "seconds": "seconds of a step"}

INTRO = """---
orphan: true
---

# Measured on a GPU

On this page you look up how far forecasts are from steps that we measured: {first} on one {one} and {second} on
one {other}, with torch {torch} and transformers 5.17. `python -m benchmarks.on_gpu.main FOLDER` measured them in a
process each, `python -m benchmarks.bench_on_gpu` forecast them on a machine without a GPU, and
`python tools/measured_on_gpu.py` writes this page. Runs of others, on many GPUs, are on the page
[published runs](published_runs.md).

Each case is a whole step, with the weights made on the GPU: forward, backward, clipping and the optimizer; *evaluated*
and *generating*, which has a cache, are forward alone. Those with several ranks are one rank of a world whose others
are missing: nothing is sent, but kernels, streams and the allocator are real. So they show memory, and no time.
TensorFloat32 is off.

"""

NOTES = """
## How to read the tables

Memory is in GiB. *Allocated* is `torch.cuda.max_memory_allocated()`, beside `step.allocated()`; *reserved* is
`max_memory_reserved()` after a fresh start, beside `step.reserved()`; *active* counts what waits for another stream
before it is free, beside `step.active()`. A step's seconds are the median of five, beside `step.time(device)`. An error
of memory is the distance from the nearest end of the forecast's interval, and in the columns of the middle from its
middle; an error of time is the distance from the usual forecast. *Inside* counts figures in their interval.

**Fitted to the steps of the H100:** cuDNN's memory for recurrent networks and convolutions; cuBLASLt's workspace of 1
MiB; that products are {alone} times as fast on a GPU by itself as in the published runs, where communication takes
power and multiprocessors; the speed of float32, convolutions, and short and memory-efficient attention; the time to
issue an operator. To the H200: the speed of batch norms, the memory of convolutions in float32, and the longest time
to issue an operator. **Not fitted:** operators and their results, the order of allocations, the streams of FSDP and
the rules of the allocator, which follow torch's sources.

**What is off, as far as we know:**

- *Small models wait for the CPU.* The CPUs of both virtual machines needed 40 to 50 us for an operator. The forecast is
  20 us, with an interval from 6 to 50. In these steps the CPU finishes issuing just before they end.
- *llama 8B without recomputation reserves up to 4 GiB more than its replay.* The GPU's own allocations, replayed
  through our model of the allocator, reserve what they did there. But the position of a block of 16 MiB decides whether
  a request of 4 GiB finds a free segment, and our replay puts it elsewhere. So an interval is longer by a buffer of
  gradients that is an eighth of all memory and the only request of its size.
- *The optimizer of the offloaded step* ran on 16 threads. The forecast counts with one, as torchrun starts a rank; the
  interval has both.

A step of an LSTM is left out, because its weights had moved: see [guards](../explanation/guards.md).

"""

FULL = """
## A GPU that is too small for the cache

One rank of 8 of MPT-30b with 8,192 tokens and FSDP1 ran on the H100 without the others, and its allocator got less
memory than it wants. The table shows how often it gave back what was free in a step of three micro-batches, beside
`retries()`. Each time took {least:.0f} to {most:.0f} ms, and a micro-batch {plain:.2f} s; ranks that wait for each
other may lose more. `python -m benchmarks.on_gpu.short_of_memory GIB` measures.

"""


def measured(device: str) -> dict[str, dict[str, Any]]:
    """Return what was measured on a device, by case."""
    return {line["name"]: line for line in _lines(f"steps_{device}.jsonl")}


def measured_with_little_memory() -> list[dict[str, Any]]:
    """Return GiB, device, torch, and seconds and retries of each micro-batch as ``steps``, by limit."""
    return _lines("short_of_memory.jsonl")


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def real_of(kind: str, line: Mapping[str, Any]) -> float | None:
    """Return a figure that was measured: GiB or seconds; None if it was not, or shows nothing."""
    if kind == "seconds":
        return statistics.median(line["seconds"]) if "seconds" in line and "ranks" not in line["name"] else None
    return float(line["peak"][kind] / _GIB)


def error_of(kind: str, line: Mapping[str, Any], found: Mapping[str, Sequence[float]]) -> float | None:
    """Return by which share a forecast is too high: of time the usual one, of memory the nearest of its interval."""
    real = real_of(kind, line)
    if real is None:
        return None
    low, high, *usual = found[kind]
    return (usual[0] if usual else min(max(real, low), high)) / real - 1


def middle_error_of(kind: str, line: Mapping[str, Any], found: Mapping[str, Sequence[float]]) -> float | None:
    """Return by which share the middle of a forecast is too high; of time, the usual one."""
    real = real_of(kind, line)
    low, high, *usual = found[kind]
    return None if real is None else (usual[0] if usual else (low + high) / 2) / real - 1


def page() -> str:
    """Return the text of the page."""
    from mmfsdp.rehearsal.timing.device_presets import PRESETS

    lines = {device: measured(device) for device in DEVICES}
    found = json.loads((DATA / FORECASTS).read_text(encoding="utf-8"))
    one, other = (next(iter(lines[device].values())) for device in DEVICES)
    first, second = map(len, lines.values())
    text = INTRO.format(
        first=first, second=second, one=one["device"], other=other["device"].removeprefix("NVIDIA "), torch=one["torch"]
    )
    rows = (row for device in DEVICES for row in _summary(device, lines[device], found[device]))
    text += _table(("forecast", "steps", "median error", "worst", "median of the middle", "worst", "inside"), rows)
    text += NOTES.format(alone=PRESETS["h100"].alone)
    text += f"## Memory\n\nSteps of both differed on the H200 by {_apart(*lines.values())}.\n\n"
    head = ("step", "allocated", "forecast", "error", "reserved", "forecast", "error", "of the middle")
    shown = {name: (line, found[device][name]) for device in reversed(DEVICES) for name, line in lines[device].items()}
    text += _table(head, (_memory(name, *pair) for name, pair in shown.items()))
    text += "\n## Seconds of a step\n"
    for device in DEVICES:
        text += f"\nOn the {device.upper()}:\n\n"
        timed = (
            _seconds(name, line, found[device][name])
            for name, line in lines[device].items()
            if real_of("seconds", line)
        )
        text += _table(("step", "measured", "until all was issued", "forecast", "error"), timed)
    return text + _full(found["short_of_memory"])


def _full(found: Sequence[Sequence[int]]) -> str:
    """Return the section about a GPU that is too small for the cache."""
    lines = measured_with_little_memory()
    every = [item for line in lines for step in line["steps"] for item in step[1:]]  # the first one also warms up
    plain = statistics.median(seconds for seconds, retries in every if not retries)
    each = [1000 * (seconds - plain) / retries for seconds, retries in every if retries]
    rows = (
        (
            f"{line['gib']}",
            ", ".join(str(sum(retries for _, retries in step)) for step in line["steps"][1:]),
            f"{low} to {high}" if low < high else str(high),
            ", ".join(f"{seconds:.2f}" for seconds, _ in line["steps"][-1]),
        )
        for line, (low, high) in zip(lines, found, strict=True)
    )
    head = ("GiB", "retries in the second step, and later ones", "forecast", "seconds of the last micro-batches")
    return FULL.format(least=min(each), most=max(each), plain=plain) + _table(head, rows)


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return by how much the memory of steps of two devices differs at most."""
    found = {
        kind: max(abs(other[name]["peak"][kind] / one[name]["peak"][kind] - 1) for name in one.keys() & other.keys())
        for kind in ("allocated", "reserved")
    }
    return " and ".join(f"{most:.1%} of what is {kind}" for kind, most in found.items())


def _summary(device: str, lines: Mapping[str, Any], found: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    for kind, title in KINDS.items():
        known = {name: real for name, line in lines.items() if (real := real_of(kind, line)) is not None}
        errors = [abs(error_of(kind, lines[name], found[name]) or 0.0) for name in known]
        inside = sum(found[name][kind][0] <= real <= found[name][kind][1] for name, real in known.items())
        middles = [abs(middle_error_of(kind, lines[name], found[name]) or 0.0) for name in known]
        pairs = ((f"{statistics.median(sizes):.2%}", f"{max(sizes):.1%}") for sizes in (errors, middles))
        shown = chain.from_iterable(pairs)
        yield f"{title}, {device.upper()}", str(len(known)), *shown, f"{inside} of {len(known)}"


def _memory(name: str, line: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    cells = [name]
    for kind in ("allocated", "reserved"):
        low, high = found[kind]
        off = error_of(kind, line, found) or 0.0
        cells += [f"{real_of(kind, line):.2f}", f"{low:.2f} to {high:.2f}", f"{off:+.1%}"]
    middle = middle_error_of("reserved", line, found) or 0.0
    return (*cells, f"{middle:+.1%}")


def _seconds(name: str, line: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    low, high, usual = found["seconds"]
    off = error_of("seconds", line, found) or 0.0
    issued = statistics.median(line["issued"])
    return (
        name,
        f"{real_of('seconds', line):.3f}",
        f"{issued:.3f}",
        f"{usual:.3f} ({low:.3f} to {high:.3f})",
        f"{off:+.0%}",
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"|{'|'.join(cells)}|\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
