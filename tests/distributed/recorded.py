"""A small model whose training is recorded, the ways to train it, and faults to inject."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mmfsdp
from mmfsdp.parity import Comparison, Recording
from mmfsdp.testing import run_ranks

BATCH, DIM, TOKENS = 8, 16, 32


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(DIM), Attend()
        self.up, self.down = nn.Linear(DIM, 2 * DIM + 1), nn.Linear(2 * DIM + 1, DIM)
        self.register_buffer("scale", torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm(x)) * self.scale
        return x + self.down(F.gelu(self.up(x)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.drop = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.drop(x)))


Fault = Callable[["Loop"], None]


class Loop:
    """A training loop that faults take hold of."""

    def __init__(self, how: str, dtype: torch.dtype = torch.float32, accumulate: int = 1) -> None:
        self.how, self.accumulate = how, accumulate
        self.rank, self.world = (0, 1) if how == "plain" else (dist.get_rank(), dist.get_world_size())
        torch.manual_seed(3)
        self.module = Small().to(dtype)
        self.prepare: list[Callable[[], None]] = []
        self.share = lambda: None  # what happens to gradients once they are averaged
        self.after_clip = lambda: None
        self.after_step = lambda: None
        self.max_norm = 0.5
        self.loss_scale = 1.0
        self.batch = self._batch
        self.clip: Callable[..., torch.Tensor] | None = None
        self.lr = 1e-2
        self.skip_step = False

    def build(self) -> None:
        self.model: Any = self.module
        if self.how in ("mmfsdp", "mixed"):  # with whole parameters between shards, the optimizer's group is divided
            whole = {"sharding": {"ignored_parameters": ["layers.0.norm.*"]}} if self.how == "mixed" else {}
            self.model = mmfsdp.shard(self.module, {"wrap": {"kind": "module_class", "classes": "Layer"}, **whole})
        elif self.how == "fully_shard":
            for layer in self.module.layers:
                fully_shard(layer, mp_policy=MixedPrecisionPolicy())
            fully_shard(self.module)
        elif self.how == "ddp":
            self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def _batch(self, step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + place)
        x, y = torch.randint(0, TOKENS, (2, BATCH, 6), generator=generator)
        return x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]

    def params(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("module."): param for name, param in self.model.named_parameters()}

    def run(self, recording: Recording, steps: int) -> None:
        clip = self.clip or (
            mmfsdp.clip_grad_norm_ if self.how in ("mmfsdp", "mixed") else torch.nn.utils.clip_grad_norm_
        )
        for step in range(steps):
            for place in range(self.accumulate):
                x, y = self.batch(step, place)
                loss = F.cross_entropy(self.model(x).float().flatten(0, 1), y.flatten()) / self.accumulate
                recording.loss(loss)
                hold = self.how != "plain" and place < self.accumulate - 1
                with self._held(hold):
                    (loss * self.loss_scale).backward()
            self.share()
            clip(self.model if clip is mmfsdp.clip_grad_norm_ else self.model.parameters(), self.max_norm)
            self.after_clip()
            self.optimizer.step()
            self.after_step()
            self.optimizer.zero_grad()

    @contextlib.contextmanager
    def _held(self, hold: bool) -> Iterator[None]:
        if self.how == "fully_shard":
            self.module.set_requires_gradient_sync(not hold)
        yield


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def record(
    rank: int, folder: Path, how: str, fault: Fault | None = None, steps: int = 2, dtype: torch.dtype = torch.float32,
    seeds: tuple[int | None, ...] = (None,), options: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    for seed in seeds:
        loop = Loop(how, dtype)
        is_before = getattr(fault, "is_before", False)
        if fault is not None and is_before:
            fault(loop)
        loop.build()
        if fault is not None and not is_before:
            fault(loop)
        target = folder if seed is None else folder.with_name(f"{folder.name}{seed}")
        with mmfsdp.recording(target, loop.model, loop.optimizer, perturb=seed, **(options or {})) as recording:
            loop.run(recording, steps)


def recorded(folder: Path, how: str, ranks: int, fault: Fault | None = None, **options: Any) -> Path:
    dtype, seeds = options.pop("dtype", torch.float32), options.pop("seeds", (None,))
    run_ranks(record, ranks, folder, how, fault, options.pop("steps", 2), dtype, seeds, options)
    return folder


def reference(folder: Path, **options: Any) -> tuple[Path, list[Path]]:
    """Record the plain model in one process, and three times with perturbed inputs."""
    target = recorded(folder, "plain", 1, seeds=(None, 1, 2, 3), **options)
    return target, [target.with_name(f"{target.name}{seed}") for seed in (1, 2, 3)]


def compared(one: tuple[Path, list[Path]], other: Path) -> Comparison:
    return mmfsdp.compare(one[0], other, perturbed=one[1])
