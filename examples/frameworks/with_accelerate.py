"""Train a model that mmfsdp has sharded in a loop of accelerate, save, and resume.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_accelerate.py --dir run

docs/howto/frameworks.md explains it. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.nn as nn
from accelerate import Accelerator
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

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = mmfsdp.shard(build(), {"wrap": {"kind": "size", "min_num_params": 500}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    batch_size = 8 // accelerator.num_processes
    loader = DataLoader(TensorDataset(data, torch.arange(64) % 4), batch_size=batch_size)
    loader = accelerator.prepare(loader)  # neither the model nor its optimizer
    accelerator.register_for_checkpointing(scheduler)

    def save(models: list[nn.Module], weights: list[object], folder: str) -> None:
        mmfsdp.save_checkpoint(Path(folder) / "sharded", model, optimizer, extra={"epoch": epoch + 1}, overwrite=True)

    def load(models: list[nn.Module], folder: str) -> None:
        nonlocal done
        extra, _ = mmfsdp.load_checkpoint(Path(folder) / "sharded", model, optimizer)
        done = extra["epoch"]

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

    done = 0
    if args.dir.exists():
        accelerator.load_state(str(args.dir))
    for epoch in range(done, args.epochs):
        for inputs, labels in loader:
            with accelerator.accumulate():
                # The passes before the last one of a step do not communicate gradients.
                keeping = contextlib.nullcontext() if accelerator.sync_gradients else mmfsdp.no_sync(model)
                with keeping:
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = mmfsdp.clip_grad_norm_(model, 0.2)
                    mean = accelerator.reduce(loss.detach(), "mean")
                    accelerator.print(f"epoch {epoch}: loss {mean:.5f}, norm {norm:.5f}")
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
        accelerator.save_state(str(args.dir))
    accelerator.end_training()


if __name__ == "__main__":
    main()
