"""A small run whose checkpoints lie in a store, for tests of stores of both kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mmfsdp


def trained(url: str | None, stop: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train up to a step, from the newest checkpoint on or without a URL, with the same rows on all ranks."""
    torch.manual_seed(0)
    model = mmfsdp.shard(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = None if url is None else mmfsdp.CheckpointManager(url, model, optimizer, every_steps=2, **options)

    def loss_of(step: int) -> torch.Tensor:
        return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()

    continue_to(stop, manager, optimizer, loss_of)
    return model, optimizer


def continue_to(
    stop: int,
    manager: mmfsdp.CheckpointManager | None,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], torch.Tensor],
) -> None:
    """Train up to a step, from the newest checkpoint of the manager on if there is one, and close the manager."""
    for step in range(0 if manager is None else manager.resume(), stop):
        loss_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if manager is not None:
            manager.step(step + 1)
    if manager is not None:
        manager.close()
        assert manager.failed_saves == 0
