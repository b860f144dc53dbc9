"""Writes docs/appendix/published_runs.md and published_runs_a100.md: forecasts beside the figures of others.

``python tools/published_runs.py`` reads the records in benchmarks/published/runs.jsonl and what
``python -m benchmarks.bench_published`` has forecast for them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGES", "error_of", "pages"]

ROOT = Path(__file__).parents[1]
DATA = ROOT / "benchmarks" / "published"
PAGES = {name: ROOT / "docs" / "appendix" / f"published_runs{name}.md" for name in ("", "_a100")}

INTRO = """---
orphan: true
---

# Published runs

On this page you look up how far forecasts are from {count} runs on GPUs that others published: the source, the
settings, the figure, the forecast. `python -m benchmarks.bench_published` rebuilds each model on shapes and rehearses
its step; nobody ran it again on a GPU. `python tools/published_runs.py` writes this page and [that of llm-foundry on
A100](published_runs_a100.md).

## How exact forecasts are

A checksum divides the runs: one half fits the shares of the peaks that kernels reach, the other half tests them.
[Measured on a GPU](measured_on_gpu.md#how-to-read-the-tables) says what the errors are; *widest* is the widest
interval, as high over low.

"""

KERNELS = """
Eleven figures were fitted. Products of matrices reach 0.72 of the peak on A100 and 0.556 on H100, less if a side is
short (half at 220 rows or columns); other operators reach 0.7 of the bandwidth, which was chosen among four values by
both halves; the attention kernels of 2023 that llm-foundry calls reach 0.46 in forward and 0.27 in backward on A100,
0.21 and 0.168 on H100. Those of torch's flash attention are from its issues and its paper.
With these for llm-foundry, too, errors are 6.1 % in the median and 32 % at worst in the half that tests: what its
kernels reach must be known. The steps of fms-acceleration were added when all of this was fixed. Forecasts of those
with adapters were 20 to 53 % too slow at first; a length of sides that follows from the dtype's peak corrected them,
and was fitted to nothing.
On the RTX 4090 products reach 1.05 of the peak, because its clock is above the stated one, other operators 0.9 of the
bandwidth, and messages 0.8 of PCIe's 25 GB/s; two of its five steps fit these shares.

{short} steps are short of memory: by `step.retries()`, torch gives back what it keeps in its cache while they train.
The two with the largest errors are those in which it does so most often, MPT-30b with 8,192 tokens on 8 GPUs of 80 GB,
60 of which hold parameters, gradients and optimizer state. The time for that [is not in the
forecast](measured_on_gpu.md#a-gpu-that-is-too-small-for-the-cache). No other step is off by more than {others}.

{retries}
The interval is the usual forecast with shares 11 % lower or higher, and with slower and faster links.

Of {all} records, {refused} are left out: {reasons}.

"""

MEMORY = """## Memory

*Reserved* is compared with `step.reserved(memory=...)` of the GPU. One figure was fitted: its uncertainty of 4 %.

torchtitan's runs of March 2024 are rebuilt with FSDP2 as it was until torch 2.4, which allocated what it reduces on the
stream that reduces.

The models of fms-acceleration are rebuilt as transformers and peft computed them: logits twice in float32, adapters in
float32, GPTBigCode's caches kept in training, and blocks recomputed from outside of their shard units. There FSDP1
holds the input and the gradient of each frozen block until backward ends, about a third of a step of Mistral with
adapters on two GPUs. We looked at all twenty runs to find that out.

LitGPT's models are rebuilt as its script and torch 2.1 ran them: logits in float32, the other factor kept of a product
with a frozen weight, blocks recomputed and whole gradients kept on several GPUs. We looked at seven of its runs to find
that out, and forecast the other twelve afterwards. Three of these, on several GPUs, were 2 to 9 % too high if all
samples are as long as the longest. So they have an interval: it begins with the first micro-batch, which has the
longest sample and no gradients yet, and ends with a later one of the same length.

The models of fsdp_qlora are rebuilt as its script ran them. We looked at them to find its release of transformers, and
that wrapping with FSDP1 leaves segments to training. A copy unpacks weights of 4 bits. With ten samples the GPU was
full once, and the allocator took less from then on: 20.97 GiB, where 23.57 are wanted. A replay with what wrapping
leaves, on a GPU of 24 GB, has 20.86; the interval covers all replays.

"""

SECONDS = """## Seconds of a step

Tokens of a step on one rank, divided by the published tokens per second. `mb` is the micro-batch, `ga` the number of
micro-batches in a step, whose gradients llm-foundry reduces each time.

"""

A100 = """---
orphan: true
---

# llm-foundry on A100

On this page you look up forecasts of steps of MPT models on A100, which belong to [published
runs](published_runs.md). All are from `scripts/train/benchmarking/README.md` of mosaicml/llm-foundry. `python
tools/published_runs.py` writes it.

"""


_KINDS = {"allocated": "allocated memory", "reserved": "reserved memory", "seconds": "seconds of a step"}


def pages() -> dict[str, str]:
    """Return the text of each page, by the names in `PAGES`."""
    runs = [json.loads(line) for line in (DATA / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    found = json.loads((DATA / "forecasts.json").read_text(encoding="utf-8"))
    rows = found["runs"]
    reasons = Counter(found["refused"].values()).most_common()
    text = INTRO.format(count=len(rows)) + _table(
        ("forecast", "runs", "half", "median", "worst", "median of the middle", "worst", "inside", "widest"),
        _summary(rows),
    )
    said = ", ".join(f"{reason} ({count})" for reason, count in reasons)
    full = [row for row in rows if "retries" in row]
    table = _table(("run", "settings", "most retries in a micro-batch", "error"), _full(runs, full))
    others = max(abs(error_of("seconds", row["seconds"])) for row in rows if "seconds" in row and row not in full)
    text += KERNELS.format(
        all=len(runs),
        refused=len(found["refused"]),
        reasons=said,
        short=len(full),
        others=f"{others:.1%}",
        retries=table,
    )
    text += MEMORY + _table(
        ("run", "settings", "kind", "published", "forecast", "error", "of the middle"), _memory(runs, rows)
    )
    elsewhere, ampere = [], []
    for row in rows:
        if "seconds" in row:
            is_ampere = "llm-foundry" in runs[row["run"]]["framework"] and "a100" in runs[row["run"]]["gpu"]
            (ampere if is_ampere else elsewhere).append(row)
    head = ("run", "settings", "published", "forecast", "error", "half")
    text += "\n" + SECONDS + _table(head, _seconds(runs, elsewhere))
    text += "\n## Sources\n\n" + "\n".join(_sources(runs, rows)) + "\n"
    return {"": text, "_a100": A100 + _table(head, _seconds(runs, ampere))}


def error_of(kind: str, figure: Sequence[float]) -> float:
    """Return by which share a forecast is too high: of time the usual one, of memory the nearest of its interval."""
    real, low, high, *usual = figure
    return (usual[0] if kind == "seconds" else min(max(real, low), high)) / real - 1


def middle_error_of(kind: str, figure: Sequence[float]) -> float:
    """Return by which share the middle of a forecast is too high; of time, the usual one."""
    real, low, high, *_ = figure
    return error_of(kind, figure) if kind == "seconds" else (low + high) / 2 / real - 1


def _summary(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    for kind, title in (
        ("allocated", "allocated memory"),
        ("active", "active memory"),
        ("reserved", "reserved memory"),
        ("seconds", "seconds of a step"),
    ):
        for half in ("fit", "test"):
            figures = [row[kind] for row in rows if kind in row and row["half"] == half]
            if not figures:
                continue
            errors = [abs(error_of(kind, figure)) for figure in figures]
            middles = [abs(middle_error_of(kind, figure)) for figure in figures]
            inside = sum(low <= real <= high for real, low, high, *_ in figures)
            yield (
                title,
                str(len(figures)),
                half,
                f"{statistics.median(errors):.1%}",
                f"{max(errors):.1%}",
                f"{statistics.median(middles):.1%}",
                f"{max(middles):.1%}",
                f"{inside} of {len(figures)}",
                f"{max(high / low for _, low, high, *_ in figures):.2f}",
            )


def _memory(runs: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    for row in rows:
        for kind in ("allocated", "active", "reserved"):
            if kind in row:
                real, low, high = row[kind]
                shown = f"{high:.2f}" if high - low < 0.1 else f"{low:.2f} to {high:.2f}"
                off = error_of(kind, row[kind])
                middle = middle_error_of(kind, row[kind])
                yield (*_named(runs[row["run"]]), kind, f"{real:.2f}", shown, f"{off:+.1%}", f"{middle:+.1%}")


def _full(runs: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    for row in rows:
        yield (*_named(runs[row["run"]]), f"{row['retries']:g}", f"{error_of('seconds', row['seconds']):+.1%}")


def _seconds(runs: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    for row in rows:
        real, low, high, usual = row["seconds"]
        shown = f"{usual:.3g} ({low:.3g}-{high:.3g})"
        yield (*_named(runs[row["run"]]), f"{real:.3g}", shown, f"{usual / real - 1:+.1%}", row["half"])


def _named(run: Mapping[str, Any]) -> tuple[str, str]:
    """Return the project with the model, and the settings, each in few words."""
    project = re.match(r"[\w-]+", run["framework"])
    assert project is not None
    device = re.sub(r"[ (].*| SXM", "", run["gpu"].replace("_", "-")).lower()
    checkpointing = {"none": "", "full": " full"}.get(run["ac"], f" {run['ac'].partition(' (')[0]}").replace(" ", "-")
    accumulate = f",ga{micro}" if (micro := run.get("grad_accum") or 1) > 1 else ""
    engine = ",FSDP1" if "FSDP1" in run["sharding"] and "torchtitan" in run["framework"] else ""
    name = f"{project[0]}-{run['model'].replace(' ', '-')}" if project[0] != "llm-foundry" else run["model"]
    settings = f"{run['num_gpus']}x{device},mb{run['micro_batch']}x{run['seq_len']}{accumulate}{engine}"
    return name, f"{settings}{checkpointing.replace('-', ',', 1)}"


def _sources(runs: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for source, count in Counter(runs[row["run"]]["source"].partition("#")[0] for row in rows).items():
        plain = source if source.startswith("http") else f"`{source}`"
        yield f"- {plain}: {count}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines) + "\n"


if __name__ == "__main__":
    for name, text in pages().items():
        PAGES[name].write_text(text, encoding="utf-8")
