"""A small run that torchrun restarts, on the same ranks or on others: see test_restarts.py.

    torchrun restarted.py FOLDER STEPS

Each rank appends the samples of its steps to ``FOLDER/order-RANK``, and saves what it ended with: ``FOLDER/end-RANK``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mmfsdp

GLOBAL_BATCH, LARGEST = 6, 3


class Rows(Dataset[Any]):
    """Random rows, and which they are."""

    def __init__(self) -> None:
        self.rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index


def train(folder: str, steps: int, waits: bool = False) -> None:
    """Train to the end, from the newest checkpoint on. If asked to, wait for ``FOLDER/go-on`` at some step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = mmfsdp.shard(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rows, parts = Rows(), mmfsdp.accumulation_steps(GLOBAL_BATCH, LARGEST)
    loader = DataLoader(rows, GLOBAL_BATCH // ranks, sampler=DistributedSampler(rows, drop_last=True), drop_last=True)
    data = mmfsdp.DataPosition(loader)
    with mmfsdp.CheckpointManager(
        f"{folder}/run", model, optimizer, every_steps=2, max_to_keep=1, state={"data": data}
    ) as manager:
        step = manager.resume()
        while step < steps:
            for batch, indices in data:
                for part, some in enumerate(batch.chunk(parts), 1):
                    with mmfsdp.no_sync(model) if part < parts else torch.enable_grad():
                        (model(some).square().mean() / parts).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                with Path(folder, f"order-{rank}").open("a") as file:
                    file.write(f"{step} {ranks} {' '.join(map(str, indices.tolist()))}\n")
                while waits and step == (4 if ranks == 1 else 8) and not Path(folder, "go-on").exists():
                    time.sleep(0.05)
                    manager.leave_if_asked(step)
                manager.step(step)
                if step == steps:
                    break
        manager.save(steps)
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
    torch.save((weights, state, torch.rand(3)), f"{folder}/end-{rank}")


def main() -> None:
    mmfsdp.init_process_group()
    Path(sys.argv[1], f"process-of-{os.environ.get('AGENT')}").write_text(str(os.getpid()))
    train(sys.argv[1], int(sys.argv[2]), waits=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
