"""How saves in the background disturb training: the stall, the steps meanwhile, and how long until all is on disk."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import torch
import torch.distributed as dist

import mmfsdp
from benchmarks.measuring import Ratio, sized, spread
from benchmarks.models import Transformer
from benchmarks.on_ranks import device, finish, on_gpu, shared_folder
from mmfsdp.collective.steps import any_of
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.writing.background import PendingSave
from mmfsdp.testing import run_ranks

__all__ = ["main"]

Kind = Literal["full", "local", "sharded", "hf"]
KINDS: tuple[Kind, ...] = sized(("sharded", "local", "full", "hf"), ("sharded", "hf"))
WIDTH, DEPTH, CYCLES = *sized((1024, 7), (64, 1)), sized(4, 1)  # 1.06 GB of weights and AdamW's state
LOOKED_AT = 2  # steps before each save
GOALS = {
    "stall over a blocking save": 0.05,
    "a step beside it over one alone": 1.1,
    "durable over a blocking save": 1.3,
}


def main() -> dict[str, Any]:
    """Measure on 2 ranks, print and return the figures of the first one, in seconds, and the ratios of each pair.

    On a GPU there is one rank, this process.
    """
    results: dict[str, Any] = {}
    for kind in KINDS:
        if device().type == "cuda":
            ratios = on_gpu(lambda rank, kind=kind: in_background(rank, kind))
        else:
            ratios = run_ranks(in_background, 2, kind, timeout=600)[0]
        for name, ratio in ratios.items():
            results[f"{kind}, {name}"] = ratio.to_dict()
            goal = f", goal {GOALS[name]}" if name in GOALS else ""
            print(f"{f'{kind}, {name}':52} {ratio.ratio}{goal}; {ratio.ours} over {ratio.theirs} s", flush=True)
    return results


def in_background(rank: int, kind: Kind) -> dict[str, Ratio]:
    """Save blocking, train, and save in the background with training beside it, in turn.

    With ``hf`` it is three times as many weights, and no state of an optimizer.
    """
    depth = DEPTH * (3 if kind == "hf" else 1)
    model = mmfsdp.shard(Transformer(WIDTH, depth).to(device()), {"wrap": {"kind": "module_class", "classes": "Block"}})
    plain = kind == "hf"
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if plain else torch.optim.AdamW(model.parameters())
    scope = find_sharded_model(model).scope
    folder = shared_folder(rank)
    path = folder / ("saved.pth" if kind == "full" else "saved")
    given: dict[str, Any] = {"like": folder / "like"} if plain else {"optimizer": optimizer}

    def step() -> None:
        model(torch.ones(2, 8, 24, device=device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish()

    def save(*, blocking: bool) -> Any:
        return mmfsdp.save_checkpoint(path, model, kind=kind, overwrite=True, blocking=blocking, **given)

    blocked, stalls, durable, alone, beside, spent, spent_blocking = ([] for _ in range(7))
    for cycle in range(CYCLES + 1):
        dist.barrier()
        seconds, busy = _costs(lambda: save(blocking=True))
        blocked.append(seconds)
        spent_blocking.append(busy)
        steps = [_costs(step) for _ in range(LOOKED_AT)]
        alone.append(statistics.median(seconds for seconds, _ in steps))
        of_a_step = statistics.median(busy for _, busy in steps)
        dist.barrier()
        begun, busy_before, meanwhile = time.perf_counter(), time.process_time(), []
        pending = save(blocking=False)
        stalls.append(time.perf_counter() - begun)
        ended = _when_done(pending)
        while any_of(scope, not pending.done()):
            meanwhile.append(_costs(step)[0])
        durable.append(ended.result() - begun)  # which may be in the middle of a step
        spent.append(max(time.process_time() - busy_before - len(meanwhile) * of_a_step, 0.0))
        beside.append(statistics.median(meanwhile or alone[-1:]))
        if cycle == 0:  # the first ones get memory
            for times in (blocked, stalls, durable, alone, beside, spent, spent_blocking):
                times.clear()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return {
        "stall over a blocking save": _ratio(stalls, blocked),
        "a step beside it over one alone": _ratio(beside, alone),
        "durable over a blocking save": _ratio(durable, blocked),
        "processor time over a blocking save": _ratio(spent, spent_blocking),
    }


def _when_done(pending: PendingSave) -> Future[float]:
    """Return the time at which a save ends, once it has."""

    def wait() -> float:
        pending.result()
        return time.perf_counter()

    watcher = ThreadPoolExecutor(1)
    ended = watcher.submit(wait)
    watcher.shutdown(wait=False)
    return ended


def _costs(function: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, and those of this process's threads on processors."""
    begun, busy = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - begun, time.process_time() - busy


def _ratio(ours: list[float], theirs: list[float]) -> Ratio:
    return Ratio(spread(ours), spread(theirs), spread([a / b for a, b in zip(ours, theirs, strict=True)]))


if __name__ == "__main__":
    main()
