"""Small models that hold what is hard to shard, and the training loop that all of these tests compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mmfsdp

BATCH = 8
BLOCKS = {"kind": "module_class", "classes": "Block"}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim + 1), nn.Linear(2 * dim + 1, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Embedding tied to the head, a scalar, dimensions that no world size divides."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Conv(nn.Module):
    """Convolutions, batch norm that keeps to its running statistics, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6).eval()
        self.block = nn.Sequential(nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Conv2d(5, 5, 1))
        self.head = nn.Linear(5, 10)

    def train(self, mode: bool = True) -> Conv:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = (x[:, None, None] + torch.arange(25.0).reshape(5, 5)).sin()[:, None]
        image = image.to(self.stem.weight.dtype)
        return self.head(self.block(self.norm(self.stem(image)).relu()).mean((2, 3)))


class Attention(nn.Module):
    """torch's attention computes with its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 9)
        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)
        self.block = Block(9)
        self.head = nn.Linear(9, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(torch.stack([x, x + 1, x * 3], 1) % 10)
        return self.head(self.block(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Frozen(Tied):
    """Tied, with a block and single parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].norm.weight.requires_grad_(False)


class FrozenBlock(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


MODELS: dict[str, type[nn.Module]] = {cls.__name__: cls for cls in (Tied, Conv, Attention, Frozen, FrozenBlock)}


class Named(nn.Module):
    """A model that is only names and tensors; it is never run.

    Args:
        tensors: Its parameters.
        buffers: The end of names that are buffers.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], buffers: str | None = None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            if buffers is not None and name.endswith(buffers):
                module.register_buffer(last, tensor)
            else:
                module.register_parameter(last, nn.Parameter(tensor))


def build(name: str = "Tied", seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]()


def batches(step: int, rank: int, world_size: int, accumulate: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of a step; all ranks' together are the same for any world size."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(0, 10, (2, accumulate, BATCH), generator=generator)
    for x, y in zip(inputs, targets, strict=True):
        yield x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    accumulate: int = 2,
    max_norm: float = 0.5,
    first: int = 0,
    sharded: bool = True,
    scaler: Any = None,
) -> list[tuple[float, float]]:
    """Train on the global batches and return each step's loss and gradient norm over all ranks."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    curve = []
    for step in range(first, first + steps):
        total = torch.zeros(())
        for place, (x, y) in enumerate(batches(step, rank, world_size, accumulate)):
            hold = sharded and place < accumulate - 1
            with mmfsdp.no_sync(model) if hold else contextlib.nullcontext():
                loss = F.cross_entropy(model(x).float(), y) / accumulate
            (scaler.scale(loss) if scaler else loss).backward()
            total += loss.detach()
        if scaler:
            scaler.unscale_(optimizer)
        if sharded:
            norm = mmfsdp.clip_grad_norm_(model, max_norm)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if sharded:
            dist.all_reduce(total)
        curve.append((float(total) / world_size, float(norm)))
    return curve


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)


def difference(curve: list[tuple[float, float]], reference: list[tuple[float, float]]) -> float:
    """Return the largest relative difference of losses and norms."""
    assert len(curve) == len(reference) > 0
    pairs = zip(curve, reference, strict=True)
    return max(abs(got - want) / abs(want) for step, wanted in pairs for got, want in zip(step, wanted, strict=True))
