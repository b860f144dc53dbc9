"""The model and the data that benchmarks train: a small transformer on batches made from a seed."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ["Block", "Transformer", "global_batch"]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, width)
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """Classifies sequences of vectors. Widths that do not divide by the ranks are fine."""

    def __init__(self, width: int = 60, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(24, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, 24) -> (batch, classes)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def global_batch(step: int, size: int, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (size, tokens, 24) and labels (size,) of one step, the same wherever they are made."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 10, (size,), generator=generator)
    noise = torch.randn(size, tokens, 24, generator=generator)
    return noise + labels[:, None, None] * 0.1, labels
