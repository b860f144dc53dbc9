"""Runs the training again and again, injects random faults, and compares each run's end with that of a run without any.

    python -m tests.campaign.campaign --faults 300 --out work_dirs/campaign

Each run has a seed, from which its kind, its faults and their moments come. What is done is in ``results.jsonl`` in the
folder; a campaign that is started again goes on with the next seed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.campaign.agents import TorchrunJob
from tests.campaign.ends import compare, numbers_of_ranks, steps_done
from tests.campaign.faults import FAULTS
from tests.campaign.injector import Injector
from tests.campaign.job import TWO_HOSTS, UNDER_MMENGINE, Job, die_with_parent
from tests.campaign.plans import KINDS, plan_faults, settings_of
from tests.campaign.report import summary
from tests.campaign.training import warm_up
from tests.distributed.hosts import two_hosts
from tests.forked_scripts import python

__all__ = ["run", "whole_run"]

PATIENCE = 240.0  # seconds in which something must move


def run(folder: Path, seed: int, settings: dict[str, Any], faults: list[tuple[str, str]], gap: float = 0.0) -> Any:
    """Train to the end through some faults, and return what happened.

    Args:
        folder: Where; it is emptied.
        seed: Decides on all that is random.
        settings: See training.py.
        faults: Phases and the faults that strike in them, one after the other.
        gap: Seconds between two, on average; without, each comes as soon as its phase does.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(folder)) if settings["kind"] in TWO_HOSTS else ()
        if settings["kind"] in ("same", "mmengine"):
            stack.enter_context(disk_of(folder / "run"))
        chance = random.Random(seed)
        under_torchrun = settings["kind"] == "torchrun"
        job = TorchrunJob(folder, settings, chance) if under_torchrun else Job(folder, settings, chance, hosts)
        stack.callback(job.end)
        return {"seed": seed, **settings, **through_faults(job, faults, gap)}


@contextmanager
def disk_of(folder: Path) -> Iterator[None]:
    """Give a folder a small file system of its own, if this user may."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    try:
        yield
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def through_faults(job: Job, planned: list[tuple[str, str]], gap: float) -> dict[str, Any]:
    """Train until the job ends with 0, while one fault after the other strikes."""
    injector, begun = Injector(job, planned, gap), time.monotonic()
    seen, moved, longest = job.board.steps(), begun, 0.0
    job.launch()
    while not job.is_done():
        now = time.monotonic()
        if job.board.steps() != seen:
            longest, moved, seen = max(longest, now - moved), now, job.board.steps()
        if now - moved > PATIENCE:
            job.end(stacks=True)
            return {"faults": injector.struck, "error": f"nothing has moved for {PATIENCE:.0f} s, see log"}
        injector.act(moved)
    return {
        "faults": injector.struck,
        "error": "",
        "launches": job.launches,
        "endings": dict(job.endings),
        "seconds": round(time.monotonic() - begun, 1),
        "longest": round(max(longest, time.monotonic() - moved), 1),
        "ranks": numbers_of_ranks(job.folder),
        "kept": round(job.settings["steps"] / max(steps_done(job.folder), job.settings["steps"]), 4),
    }


def whole_kind(kind: str) -> str:
    """Return the kind of the run without faults that one of a kind is compared with."""
    return "mmengine" if kind in UNDER_MMENGINE else kind if kind == "elastic" else "same"


def whole_run(folder: Path, steps: int, kind: str) -> Path:
    """Train without faults, unless this is done already, and return where."""
    if not (folder / "end-1").exists():
        settings = settings_of(kind, steps, random.Random(0))
        result = run(folder, 0, settings, [])
        assert not result["error"], (result, (folder / "log").read_text()[-4000:])
    return folder


def one(seed: int, out: Path, arguments: argparse.Namespace, wholes: dict[str, Path]) -> dict[str, Any]:
    """Do what a seed decides on, and compare the end. The folder of a run that ended otherwise is left."""
    chance = random.Random(seed)
    kind = chance.choices(arguments.kinds, [KINDS[kind] for kind in arguments.kinds])[0]
    settings = settings_of(kind, arguments.steps, chance, arguments.pace)
    folder = out / f"run-{seed}"
    result = run(
        folder, seed, settings, plan_faults(kind, arguments.per_run, chance, arguments.faults_of), arguments.gap
    )
    if not result["error"]:
        whole, elastic = wholes[whole_kind(kind)], kind == "elastic"
        result["error"], result["distance"] = compare(whole, folder, steps=arguments.steps, elastic=elastic)
    if not result["error"]:
        shutil.rmtree(folder)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("work_dirs/campaign"))
    parser.add_argument("--faults", type=int, default=1000, help="how many in all")
    parser.add_argument("--per-run", type=int, default=14, help="how many in a run")
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between two, on average")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--faults-of", nargs="+", default=[*FAULTS], choices=[*FAULTS], help="types, all by default")
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    arguments = parser.parse_args()
    out, steps = arguments.out.resolve(), arguments.steps
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    torch.set_num_threads(1)
    warm_up()
    if not {*UNDER_MMENGINE}.isdisjoint(arguments.kinds):  # once, before ranks are forked
        importlib.import_module("tests.campaign.under_mmengine")
    kinds = dict.fromkeys(map(whole_kind, arguments.kinds))
    wholes = {kind: whole_run(out / f"whole-{kind}-{steps}", steps, kind) for kind in kinds}
    seed = max([arguments.seed - 1, *(result["seed"] for result in done)]) + 1
    if "torchrun" in arguments.kinds:
        python()  # else each process of the pool would start a server of its own, and wait for its end
    with ProcessPoolExecutor(
        arguments.jobs, mp_context=multiprocessing.get_context("fork"), initializer=die_with_parent
    ) as pool:
        waiting: set[Future[dict[str, Any]]] = set()
        while True:
            under_way = sum(len(result["faults"]) for result in done) + len(waiting) * arguments.per_run
            while len(waiting) < arguments.jobs and under_way < arguments.faults:
                waiting.add(pool.submit(one, seed, out, arguments, wholes))
                seed, under_way = seed + 1, under_way + arguments.per_run
            if not waiting:
                break
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                done.append(future.result())
                with results.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(json.dumps(done[-1]), flush=True)
    print(summary(done))
    return 1 if any(result["error"] for result in done) else 0


if __name__ == "__main__":
    sys.exit(main())
