"""How long saves in the background hold training up, and a Hugging Face folder from ranks over ``kind="sharded"``."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import mmfsdp
from benchmarks.measuring import Ratio, paired, sized, spread, timed
from benchmarks.models import Transformer
from benchmarks.on_ranks import compared_on_ranks, device, finish
from mmfsdp.collective.steps import any_of
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.saving.background import saver_of
from mmfsdp.testing import run_ranks

__all__ = ["main"]

Kind = Literal["full", "local", "sharded"]
WIDTH, DEPTH, PAIRS = *sized((1024, 21), (64, 2)), sized(10, 2)  # 1.06 GB


def main() -> dict[str, Any]:
    """Measure on 2 ranks and return the ratios."""
    results = compared_on_ranks({"staging over copying": staging, "kind='hf' over 'sharded'": exporting})
    kinds: tuple[Kind, ...] = ("sharded", "local", "full")
    for kind in kinds:
        for name, ratio in run_ranks(in_background, 2, kind, timeout=300)[0].items():
            results[f"{kind}, {name}"] = ratio.to_dict()
            print(
                f"{kind + ', ' + name:45} ratio {ratio.ratio}; ours {ratio.ours} s, theirs {ratio.theirs} s", flush=True
            )
    return results


def staging(rank: int) -> Ratio:
    """The copy that `save_checkpoint(..., blocking=False)` waits for, and the simplest one that would do."""
    model = mmfsdp.shard(Transformer(WIDTH, DEPTH).to(device()), {"wrap": {"kind": "module_class", "classes": "Block"}})
    content = {name: value.to_local() for name, value in model.state_dict().items()}
    saver = saver_of(find_sharded_model(model).mesh)

    def ours() -> None:
        dist.barrier()
        saver.stage(content)
        finish()

    def theirs() -> None:
        dist.barrier()
        for value in content.values():
            torch.empty_like(value, device="cpu").copy_(value)
        finish()

    return paired(ours, theirs, PAIRS)


def in_background(rank: int, kind: Kind) -> dict[str, Ratio]:
    """Save 1.06 GB of weights and AdamW's state, blocking and in the background with training beside it, in turn."""
    wrap = {"kind": "module_class", "classes": "Block"}
    model = mmfsdp.shard(Transformer(WIDTH, DEPTH // 3 or 1).to(device()), {"wrap": wrap})
    optimizer = torch.optim.AdamW(model.parameters())
    scope = find_sharded_model(model).scope
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    path = Path(folders[0], "saved.pth" if kind == "full" else "saved")

    def step() -> None:
        model(torch.ones(2, 8, 24, device=device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish()

    def save(*, blocking: bool) -> Any:
        return mmfsdp.save_checkpoint(path, model, optimizer, kind=kind, overwrite=True, blocking=blocking)

    blocked, stalls, durable, alone, beside = [], [], [], [], []
    for cycle in range(PAIRS + 2):
        dist.barrier()
        blocked.append(timed(lambda: save(blocking=True)))
        alone.append(statistics.median(timed(step) for _ in range(4)))
        dist.barrier()
        begun, steps = time.perf_counter(), []
        pending = save(blocking=False)
        stalls.append(time.perf_counter() - begun)
        while any_of(scope, not pending.done()):
            steps.append(timed(step))
        pending.result()
        durable.append(time.perf_counter() - begun)
        beside.append(statistics.median(steps or alone[-1:]))
        if cycle == 1:  # the first ones get memory
            for times in (blocked, stalls, durable, alone, beside):
                times.clear()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    return {
        "stall over a blocking save": _ratio(stalls, blocked),
        "durable over a blocking save": _ratio(durable, blocked),
        "a step beside it over alone": _ratio(beside, alone),
    }


def _ratio(ours: list[float], theirs: list[float]) -> Ratio:
    return Ratio(spread(ours), spread(theirs), spread([a / b for a, b in zip(ours, theirs, strict=True)]))


def exporting(rank: int) -> Ratio:
    """Saving the weights as a folder for transformers, and as each rank's part of a DCP directory."""
    model = mmfsdp.shard(Transformer(WIDTH, DEPTH).to(device()), {"wrap": {"kind": "module_class", "classes": "Block"}})
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    if rank == 0:
        (folder / "like").mkdir()
        (folder / "like/config.json").write_text('{"model_type": "own", "tie_word_embeddings": false}')
    dist.barrier()

    def ours() -> None:
        mmfsdp.save_checkpoint(folder / "hf", model, kind="hf", like=folder / "like", overwrite=True)

    def theirs() -> None:
        mmfsdp.save_checkpoint(folder / "sharded", model, overwrite=True)

    ratio = paired(ours, theirs, PAIRS)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return ratio


if __name__ == "__main__":
    main()
