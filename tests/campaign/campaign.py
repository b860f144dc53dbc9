"""Runs the training again and again, injects random faults, and compares each run's end with that of a run without any.

    python -m tests.campaign.campaign --faults 300 --out work_dirs/campaign

Each run has a seed, from which its faults and their moments come. What is done is in ``results.jsonl`` in the folder; a
campaign that is started again goes on with the next seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tests.campaign.faults import FAULTS, Job
from tests.forked_scripts import python

__all__ = ["compare", "run"]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("training.py")
ELASTIC = 0.25  # share of runs whose number of ranks changes
PATIENCE = 240.0  # seconds after the last fault in which a run must end


def launch(folder: Path, steps: int, ranks: int, noise: bool) -> subprocess.Popen[bytes]:
    """Start torchrun, whose output is added to ``log``."""
    words = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000", "--monitor-interval", "0.1"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, str(ROOT)])), "OMP_NUM_THREADS": "1"}
    command = [python(), "-m", "torch.distributed.run", *words, str(PROGRAM), str(folder), str(steps), str(int(noise))]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environ)


def run(
    folder: Path,
    seed: int,
    *,
    steps: int,
    count: int,
    gap: float,
    names: list[str] | None = None,
    share: float = ELASTIC,
) -> dict[str, Any]:
    """Train to the end through some faults, and return what happened.

    Args:
        folder: Where; it is emptied.
        seed: Decides on all that is random.
        steps: Steps of the training.
        count: Faults, one after the other.
        gap: Seconds between two faults, on average; the first may come while ranks start.
        names: The faults to choose from; all by default.
        share: How probable it is that the number of ranks changes whenever the job starts again.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    chosen = names or [*FAULTS]
    with disk_of(folder / "run") if "full disk" in chosen else nullcontext(True) as limited:
        chosen = [name for name in chosen if limited or name != "full disk"]
        return through_faults(folder, seed, steps, count, gap, chosen, share)


@contextmanager
def disk_of(folder: Path) -> Iterator[bool]:
    """Give a folder a small file system of its own, if this user may, and say whether it has one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def through_faults(
    folder: Path, seed: int, steps: int, count: int, gap: float, names: list[str], share: float
) -> dict[str, Any]:
    chance = random.Random(seed)
    elastic = chance.random() < share
    ranks = 2
    job = Job(folder, launch(folder, steps, ranks, not elastic), chance, ranks)
    faults, launches, begun = [], 1, time.monotonic()
    due, deadline = begun + chance.uniform(0, 2 * gap), begun + PATIENCE
    while (code := job.launcher.poll()) != 0:
        now = time.monotonic()
        if now > deadline:
            error = f"not at its end {PATIENCE:.0f} s after the last fault; ranks alive: {len(job.pids())}, see log"
            end(job)
            return {"seed": seed, "faults": faults, "error": error}
        if code is not None:  # a scheduler would start the job again
            ranks = chance.choice([1, 2, 3]) if elastic else 2
            job = Job(folder, launch(folder, steps, ranks, not elastic), chance, ranks)
            launches += 1
        elif len(faults) < count and now >= due:
            name = chance.choice(names)
            faults.append(name)
            FAULTS[name](job)
            due, deadline = time.monotonic() + chance.uniform(0, 2 * gap), time.monotonic() + PATIENCE
        time.sleep(0.02)
    lines = [line.split() for line in (folder / "order-0").read_text().splitlines()]
    return {
        "seed": seed,
        "faults": faults,
        "elastic": elastic,
        "launches": launches,
        "seconds": round(time.monotonic() - begun, 1),
        "ranks": sorted({int(ranks) for _, ranks, *_ in lines}),
        "kept": round(steps / max(len(lines), steps), 4),
    }


def end(job: Job) -> None:
    """End a job that hangs; its ranks write their stacks into the log before."""
    job.signal_ranks(job.pids(), signal.SIGUSR2)
    time.sleep(1.0)
    job.signal_ranks(job.pids(), signal.SIGKILL)
    job.launcher.kill()
    job.launcher.wait()


def compare(whole: Path, folder: Path, *, steps: int, elastic: bool) -> str:
    """Return how a run differs from the one without faults, or nothing."""
    expected = torch.load(whole / "end-0")
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if elastic else {"rtol": 0.0, "atol": 0.0}
    if order(folder, steps) != order(whole, steps):
        return "the samples of the steps differ"
    try:
        for rank in range(1 if elastic else 2):
            expected, found = (torch.load(place / f"end-{rank}") for place in (whole, folder))
            parts = 3 if elastic else 4  # on other ranks, random numbers begin anew
            torch.testing.assert_close(found[:parts], expected[:parts], **tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def order(folder: Path, steps: int) -> dict[int, list[int]]:
    """The samples of each step, over all ranks. Where a step was done again, of the last time."""
    by_rank: list[dict[int, tuple[int, list[int]]]] = []
    for file in sorted(folder.glob("order-?")):
        lines = [line.split() for line in file.read_text().splitlines()]
        by_rank.append({int(step): (int(ranks), [*map(int, rest)]) for step, ranks, *rest in lines})
    found = {}
    for step in range(1, steps + 1):
        ranks = by_rank[0][step][0]
        found[step] = sorted(sample for rank in range(ranks) for sample in by_rank[rank][step][1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("work_dirs/campaign"))
    parser.add_argument("--faults", type=int, default=1000, help="how many in all")
    parser.add_argument("--per-run", type=int, default=8, help="how many in a run")
    parser.add_argument("--gap", type=float, default=3.0, help="seconds between two, on average")
    parser.add_argument("--steps", type=int, default=300, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    arguments = parser.parse_args()
    out, steps = arguments.out.resolve(), arguments.steps
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for noise in (True, False):
        whole = out / f"whole-{int(noise)}-{steps}"
        if not (whole / "end-1").exists():
            shutil.rmtree(whole, ignore_errors=True)
            whole.mkdir()
            assert launch(whole, steps, 2, noise).wait() == 0, (whole / "log").read_text()[-4000:]
    seed = max([arguments.seed - 1, *(result["seed"] for result in done)]) + 1
    while sum(len(result["faults"]) for result in done) < arguments.faults:
        folder = out / f"run-{seed}"
        result = run(folder, seed, steps=steps, count=arguments.per_run, gap=arguments.gap)
        if "error" not in result:
            whole = out / f"whole-{int(not result['elastic'])}-{steps}"
            result["error"] = compare(whole, folder, steps=steps, elastic=result["elastic"])
        if not result["error"]:
            shutil.rmtree(folder)
        done.append(result)
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        seed += 1
    failed = [result for result in done if result["error"]]
    faults = Counter(name for result in done for name in result["faults"])
    kept = sorted(result["kept"] for result in done if "kept" in result)
    print(f"{sum(faults.values())} faults of {len(faults)} types in {len(done)} runs; {len(failed)} runs failed")
    print(f"steps kept: median {kept[len(kept) // 2]:.1%}, least {kept[0]:.1%}")
    for name, times in faults.most_common():
        print(f"{times:5} {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
