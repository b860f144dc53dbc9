"""The model and the loop that the tests on a GPU share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["WRAP", "Net", "losses"]

WRAP = {"kind": "module_class", "classes": "Layer"}


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two linear layers, with weights of seed 0."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def losses(
    model: nn.Module,
    device: torch.device,
    *,
    steps: int = 5,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    first: int = 0,
) -> list[float]:
    """Train on batches that depend on the step alone, and return each step's loss."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 16, generator=generator).to(device)
        y = torch.randint(0, 10, (32,), generator=generator).to(device)
        loss = F.cross_entropy(model(x).float(), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found
