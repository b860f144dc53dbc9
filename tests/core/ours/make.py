"""Saves a run as this release does it, on two ranks, for the tests that read what earlier releases wrote.

``python tests/core/ours/make.py`` writes a folder named after the version, once for each release: a test asks for it.
A folder of a release is never written again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mmfsdp
from mmfsdp.testing import run_ranks

__all__ = ["HERE", "KINDS", "STEPS", "build", "train"]

HERE = Path(__file__).resolve().parent
KINDS = {"full": "full.pth", "local": "local", "sharded": "sharded", "safetensors": "weights.safetensors"}
STEPS = 2


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return a model in two units with uneven rows, its optimizer and a scheduler. All ranks must call it."""
    torch.manual_seed(0)
    model = mmfsdp.shard(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), wrap="Linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def train(model: nn.Module, optimizer: Any, scheduler: Any) -> float:
    """Do one step on a batch that is the same in all steps and on all ranks, and return its loss."""
    loss = model(torch.linspace(-1, 1, 32).view(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return float(loss.detach())


def save(rank: int, folder: str) -> list[float]:
    """Save a run after `STEPS` steps in every way, and return the losses of the next two."""
    model, optimizer, scheduler = build()
    manager = mmfsdp.CheckpointManager(f"{folder}/run", model, optimizer, schedulers=scheduler, every_steps=STEPS)
    manager.resume()
    for step in range(STEPS):
        train(model, optimizer, scheduler)
        manager.step(step + 1)
    manager.close()
    for kind, name in KINDS.items():
        state = None if kind == "safetensors" else optimizer
        mmfsdp.save_checkpoint(f"{folder}/{name}", model, state, kind=kind)
    return [train(model, optimizer, scheduler) for _ in range(2)]


if __name__ == "__main__":
    target = HERE / mmfsdp.__version__
    if target.exists():
        sys.exit(f"{target} exists, and stays as it is.")
    target.mkdir()
    losses, _ = run_ranks(save, 2, str(target))
    (target / "losses.json").write_text(json.dumps(losses))
