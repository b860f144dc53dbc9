"""A step of Muon: `mmfsdp.build_optimizer` beside `torch.optim.Muon` on the same shards, and beside one process."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import mmfsdp
from benchmarks.measuring import Spread, sized, spread
from benchmarks.on_ranks import device, finish, on_gpu
from mmfsdp.optimizers.shards import local_of
from mmfsdp.testing import run_ranks

__all__ = ["main"]

BLOCKS, WIDTH = sized((12, 256), (2, 32))
STEPS = sized((6,), (2,))[0]
RANKS = sized((1, 2, 4), (1, 2))
if device().type == "cuda":
    BLOCKS, WIDTH, RANKS = 12, 1024, (1,)
OPTIMIZER = {"muon": "auto", "lr": 0.02}


class Block(nn.Module):
    """Six matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH - 2, bias=False), nn.Linear(4 * WIDTH - 2, WIDTH, bias=False)


def main() -> dict[str, Any]:
    """Measure on 1, 2 and 4 ranks; return torch's time over ours, and processor time over that of one process."""
    run = (lambda function, ranks, timeout: [on_gpu(function)]) if device().type == "cuda" else run_ranks
    [(alone, _, alone_processor)] = run(measured, 1, timeout=600)
    print(f"one process, torch.optim.Muon             {alone} s, {alone_processor} s of the processor", flush=True)
    found: dict[str, Any] = {}
    for ranks in RANKS:
        answers = run(measured, ranks, timeout=600)
        theirs, ours, _ = answers[0]
        processor = sum(answer[2].median for answer in answers)
        found[f"{ranks} ranks"] = {
            "torch over ours": theirs.median / ours.median,
            "processor over one process": processor / alone_processor.median,
        }
        print(
            f"{ranks} ranks: torch {theirs} s, ours {ours} s: {theirs.median / ours.median:.1f} times; processor time "
            f"of all ranks over one process {processor / alone_processor.median:.2f}",
            flush=True,
        )
    return found


def measured(rank: int) -> tuple[Spread, Spread, Spread]:
    """Time steps in turn: torch's, ours, and ours in processor time."""
    torch.set_num_threads(1)
    model = mmfsdp.shard(nn.Sequential(*(Block() for _ in range(BLOCKS))), {"wrap": "Block", "optimizer": OPTIMIZER})
    theirs = torch.optim.Muon(model.parameters(), lr=0.02)
    ours = mmfsdp.build_optimizer(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        local_of(param.grad).normal_()
    times: list[tuple[float, float, float]] = []
    for _ in range(STEPS + 1):
        dist.barrier()
        began = time.perf_counter()
        theirs.step()
        finish()
        dist.barrier()
        middle, processor = time.perf_counter(), time.process_time()
        ours.step()
        finish()
        processor = time.process_time() - processor
        dist.barrier()
        times.append((middle - began, time.perf_counter() - middle, processor))
    first, second, third = zip(*times[1:], strict=True)
    return spread(first), spread(second), spread(third)


if __name__ == "__main__":
    main()
