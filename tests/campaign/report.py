"""Writes the page on a campaign: faults by type and phase, and how the runs ended.

python -m tests.campaign.report work_dirs/campaign/results.jsonl > docs/explanation/faults.md
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
_PAGE = """# Runs through faults

On this page you see what happened to runs in which {count:,} faults were injected, of {types} types, and in every phase
of a run. {outcome}

Each run trains a small vision transformer on images of digits for {steps} steps, with a `CheckpointManager`,
`DataPosition`, `watch_ranks`, an evaluation every 10 steps and a save every 6, of each kind, in the background and not.
A seed decides on the faults and on their moments: each fault waits for a phase, which the program announces, and for a
random time after that. Whatever ends the ranks, all start again, as torchrun would start them. After the last step,
weights, optimizer, learning rate, random numbers and the samples of every step in their order are compared with those
of a run without faults:

- on the same ranks bit for bit;
- where the number of ranks changed in mid-run, with the global batch kept by `accumulation_steps`, to 1e-6 in float32:
  absolute, and relative for numbers above 1. Random numbers belong to ranks, so they are not compared there. These runs
  use SGD with momentum. On other ranks sums are added in another order, so gradients differ in their last bits; AdamW
  divides by small numbers, which can enlarge such a difference of a weight beyond 1e-6, with faults or without.

Runs under MMEngine do the same through `FlexibleRunner`, `FSDPStrategy` and `CheckpointHook`.

{table}

A fault is counted in the phase in which the rank was when it struck. "A node joins", "a node leaves" and "a node is
killed" change the number of ranks. A lost node loses its own disk as well, and a network is cut between two hosts in
namespaces of their own. A store gets half of a file before the sender dies or gets an error. When memory is short the
kernel kills the largest process; here the same signal does. The launcher is part of the test: it forks ranks, which
takes milliseconds, and otherwise does as torchrun does. In some runs torchrun itself starts the ranks, and starts them
again with `--max-restarts`; where it is asked to end, or fails, it is started again. Other tests let agents of torchrun
come and leave.

A run whose only checkpoint is damaged does not begin again by itself: `resume` raises an error. So files are damaged
only where there is an older checkpoint. Half an upload of the first `full` checkpoint, which is one file, leads there
in a store that shows unfinished files, which S3 does not: a run that "ended otherwise" in a store did so.

{times}

`nox -s campaign` goes on with this in `work_dirs/campaign`, and `python -m tests.campaign.report` writes this page. On
torch {torch}, Python {python}, on the CPU, over gloo.
"""
_TIMES = """The longest time without a step, restarts included, was {median:.0f} s in the median run and {most:.0f} s at
most. The timeout of `init_process_group`, of collectives and of `MMFSDP_TIMEOUT` was 40 s, `stall_seconds` 10 s, and
the machine was busy. There was a fault every {apart:.1f} steps; of the steps that were done, {kept:.0%} counted in the
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
        outcome=f"{'All' if not failed else done} of {len(results)} runs ended as one without faults.",
        steps=max(result["steps"] for result in results),
        table=summary(results),
        times=times(results),
        torch=torch.__version__,
        python=sys.version.split()[0],
    )


if __name__ == "__main__":
    print(page([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), end="")
