"""Writes the tables on a campaign: faults by type and phase, and how the runs ended.

python -m tests.campaign.report work_dirs/campaign/results.jsonl > docs/appendix/faults.md

docs/explanation/faults.md is written by hand, and repeats the second table and the figures.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tests.campaign.board import PHASES

__all__ = ["page", "summary"]

_RUNS = {
    "same": "2 ranks, one disk",
    "store": "2 ranks, a store",
    "hosts": "2 hosts, two tiers",
    "elastic": "1 to 3 ranks, which change",
    "torchrun": "2 ranks, torchrun starts them again",
    "mmengine": "2 ranks under MMEngine",
    "mmengine_hosts": "2 hosts under MMEngine, two tiers",
}
_PAGE = """---
orphan: true
---

# Faults that were injected

On this page you look up how many faults of each type were injected, and in which phase of a run, for [runs through
faults](../explanation/faults.md). `python -m tests.campaign.report` writes this page.

{count:,} faults of {types} types were injected; {outcome} A fault is counted in the phase in which the
rank was when it struck. On torch {torch}, Python {python}, on the CPU, over gloo.

{table}

{times}
"""
_TIMES = """The longest time without a step, restarts included, was {median:.0f} s in the median run and {most:.0f} s at
most. There was a fault every {apart:.1f} steps; of the steps that were done, {kept:.0%} counted in the
median run."""


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Return tables on the runs of a campaign, as Markdown."""
    faults = Counter((name, phase) for result in results for phase, name in result["faults"])
    names = sorted({name for name, _ in faults})
    lines = [f"| fault | {' | '.join(PHASES)} | all |", f"|---|{'---:|' * (len(PHASES) + 1)}"]
    for name in names:
        counts = [faults[name, phase] for phase in PHASES]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    counts = [sum(faults[name, phase] for name in names) for phase in PHASES]
    lines.append(f"| all | {' | '.join(map(str, counts))} | {sum(counts):,} |")
    lines += ["", "| runs on | runs | faults | ended otherwise | largest difference | changes of the number of ranks |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for kind, words in _RUNS.items():
        own = [result for result in results if result["kind"] == kind]
        failed = sum(bool(result["error"]) for result in own)
        distance = max((result.get("distance", 0.0) for result in own if not result["error"]), default=0.0)
        largest = f"{distance:.1e}" if distance else "0"
        changes = sum(max(len(result.get("ranks", [])) - 1, 0) for result in own)
        count = sum(len(result["faults"]) for result in own)
        lines.append(f"| {words} | {len(own)} | {count} | {failed} | {largest} | {changes} |")
    return "\n".join(lines)


def times(results: Sequence[dict[str, Any]]) -> str:
    """Return a paragraph on how long runs stood still, and how many steps they did again."""
    ended = [result for result in results if "longest" in result]
    longest = [result["longest"] for result in ended]
    apart = sum(result["steps"] for result in ended) / sum(len(result["faults"]) for result in ended)
    kept = median(result["kept"] for result in ended)
    return _TIMES.format(median=median(longest), most=max(longest), apart=apart, kept=kept)


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return the whole page."""
    struck = [name for result in results for _, name in result["faults"]]
    failed = [result for result in results if result["error"]]
    done = len(results) - len(failed)
    return _PAGE.format(
        count=len(struck),
        types=len({*struck}),
        outcome=f"{'all' if not failed else done} of {len(results)} runs ended as one without faults.",
        table=summary(results),
        times=times(results),
        torch=torch.__version__,
        python=sys.version.split()[0],
    )


if __name__ == "__main__":
    print(page([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), end="")
