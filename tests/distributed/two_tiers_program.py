"""Trains on this node's own disk alone, from the newest step that the nodes have together; see test_two_tiers.py."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mmfsdp
from mmfsdp.checkpoint.tree import leaves


def told(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the step, and sums of weights and optimizer state, which do not depend on the number of ranks."""
    yield str(step)
    states = [mmfsdp.model_state_dict(model, rank0_only=False)]
    states.append(mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)["state"])
    for _, value in leaves(states):
        if isinstance(value, torch.Tensor):
            yield f"{float(value.double().sum()):.17g}"


def main() -> None:
    """Train up to a step; then die, or write the weights to standard output."""
    disk, stop, dies = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "dies"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = mmfsdp.shard(nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    manager = mmfsdp.CheckpointManager(
        disk / "durable", model, optimizer, kind="full", fast_directory=disk / "fast", fast_every_steps=2
    )
    begin = manager.resume()
    if begin:
        print(*told(begin, model, optimizer))
    for step in range(begin + 1, stop + 1):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step)
        if step % 2 == 0:
            manager.wait()
            if dies:
                print(*told(step, model, optimizer))
    if dies:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # as a node that loses power: nothing is closed
    manager.close()
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    print(begin, *(f"{float(value.double().sum()):.17g}" for value in weights.values()), float(torch.rand(1)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
