"""Train on any number of nodes, sharded within each and replicated across them, and go on from the last checkpoint.

    torchrun --standalone --nproc-per-node 2 examples/multi_node/train.py --dir /shared/run

docs/howto/multi_node.md has the command lines for several nodes. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

import mmfsdp

GLOBAL_BATCH = 8  # samples per step, on any number of ranks
LARGEST = 4  # samples that a rank computes at once


def build() -> nn.Module:
    """A small model, the same wherever it is built."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def batch_of(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(GLOBAL_BATCH, 16, generator=generator), torch.arange(GLOBAL_BATCH) % 4
    return inputs[rank::world_size], labels[rank::world_size]


def main() -> None:
    """Train some steps and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where checkpoints go; all nodes see it")
    parser.add_argument("--steps", type=int, default=3, help="how many steps the whole training has")
    parser.add_argument("--kind", choices=["full", "local", "sharded"], default="sharded")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mmfsdp.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = mmfsdp.accumulation_steps(GLOBAL_BATCH, LARGEST)
    nodes = world_size // int(os.environ["LOCAL_WORLD_SIZE"])

    strategy = "FULL_SHARD" if nodes == 1 else "HYBRID_SHARD"  # a group of shards is the ranks of one node
    model = mmfsdp.shard(build(), {"sharding": {"strategy": strategy}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with mmfsdp.CheckpointManager(args.dir, model, optimizer, every_minutes=30, kind=args.kind) as manager:
        done = manager.resume()
        for step in range(done, args.steps):
            inputs, labels = batch_of(step, rank, world_size)
            total = torch.zeros((), device=device)
            for part, (some, right) in enumerate(zip(inputs.chunk(parts), labels.chunk(parts), strict=True), 1):
                with contextlib.nullcontext() if part == parts else mmfsdp.no_sync(model):
                    loss = nn.functional.cross_entropy(model(some.to(device)), right.to(device)) / parts
                    loss.backward()
                total += loss.detach()
            mmfsdp.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {total.item() / world_size:.6f}", flush=True)
            manager.step(step + 1)
        manager.save(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
