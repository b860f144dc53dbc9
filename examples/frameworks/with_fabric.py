"""Train a model that mmfsdp has sharded in a loop of Lightning Fabric, save, and resume.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_fabric.py --dir run

docs/howto/frameworks.md explains it. Without a GPU it runs on the CPU. It needs `pip install lightning-fabric`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn as nn
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import mmfsdp


def build() -> nn.Module:
    """A small model, the same wherever it is built."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def main() -> None:
    """Train some steps, save, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where the checkpoint goes; all nodes see it")
    parser.add_argument("--epochs", type=int, default=2, help="how many epochs to train in all")
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    model = mmfsdp.shard(build(), {"wrap": {"kind": "size", "min_num_params": 500}})
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data, torch.arange(64) % 4), batch_size=8 // world_size)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))  # all but the model
    loader = fabric.setup_dataloaders(loader)

    done = 0
    if args.dir.exists():
        extra, _ = mmfsdp.load_checkpoint(args.dir, model, optimizer.optimizer)
        done = extra["epoch"]
    for epoch in range(done, args.epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss)
            norm = mmfsdp.clip_grad_norm_(model, 0.2)
            optimizer.step()
            optimizer.zero_grad()
            mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
            fabric.print(f"epoch {epoch}: loss {mean:.5f}, norm {norm:.5f}")
        mmfsdp.save_checkpoint(args.dir, model, optimizer.optimizer, extra={"epoch": epoch + 1}, overwrite=True)


if __name__ == "__main__":
    main()
