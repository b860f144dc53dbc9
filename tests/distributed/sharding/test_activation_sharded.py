"""Activation checkpointing within sharded and replicated models: the same training as without it, on two ranks."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mmfsdp.sharding.activation import apply_activation_checkpointing
from mmfsdp.testing import run_ranks

WORLD_SIZE = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    fqns: tuple[str, ...] = ("blocks.0", "blocks.1")
    mode: str = "full"
    save_ops: tuple[str, ...] = ()
    offload: bool = False
    preserve_rng_state: bool = True
    use_reentrant: bool = False
    early_stop: bool = True
    determinism_check: str = "default"


PLANS = {
    "full": Plan(),
    "root": Plan(("",)),
    "nested": Plan(("", "blocks.0")),
    "within": Plan(("blocks.0.up", "blocks.1.up")),
    "ops": Plan(mode="ops"),
    "offload": Plan(offload=True),
    "ops-offload": Plan(mode="ops", offload=True),
    "reentrant": Plan(use_reentrant=True),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, *, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x)["x"]
        return self.head(x)


def shard_fsdp2(model: nn.Module) -> nn.Module:
    """Shard blocks, and units within them, and gather two units ahead: not at the same places when recomputed."""
    units = [module for block in model.blocks for module in (block, block.down)]
    for module in reversed(units):
        fully_shard(module)
    fully_shard(model)
    for place, unit in enumerate(units := [model, *units]):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 3])
    return model


def shard_fsdp1(model: nn.Module) -> nn.Module:
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": shard_fsdp2,
    "fsdp1": shard_fsdp1,
    "ddp": DistributedDataParallel,
}


class Gelus(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.gelu.default
        return func(*args, **(kwargs or {}))


def train(engine: str, plan: Plan | None) -> tuple[dict[str, torch.Tensor], int]:
    """Two optimizer steps of two accumulated micro-batches; returns the weights, and the GELUs that backward ran."""
    torch.manual_seed(0)
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    if plan is not None:
        apply_activation_checkpointing(model, plan)  # type: ignore[arg-type]
    sharded = ENGINES[engine](model)
    if engine == "fsdp2":
        assert [name for name, _ in sharded.named_parameters()] == names
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    recomputed = 0
    for _ in range(2):
        for last in (False, True):
            inputs = torch.randn(4, 16)
            if engine == "fsdp2":
                sharded.set_requires_gradient_sync(last)
                loss = sharded(inputs).square().mean()
                with Gelus() as gelus:
                    loss.backward()
            elif last:
                loss = sharded(inputs).square().mean()
                with Gelus() as gelus:
                    loss.backward()
            else:
                with sharded.no_sync(), Gelus() as gelus:
                    sharded(inputs).square().mean().backward()
                gelus.count = 0
            recomputed += gelus.count
        optimizer.step()
        optimizer.zero_grad()
    return {name: _full(value) for name, value in (*sharded.named_parameters(), *sharded.named_buffers())}, recomputed


def _full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def compare(rank: int, engine: str, names: list[str]) -> None:
    want, none = train(engine, None)
    assert none == 0
    problems = {}
    for name in names:
        try:
            got, recomputed = train(engine, PLANS[name])
        except Exception:
            problems[name] = traceback.format_exc()
            break
        different = [key for key in want if not torch.equal(got[key], want[key])]
        if different or list(got) != list(want):
            problems[name] = f"differ: {different}"
        expected = 0 if name == "within" else (8 if engine == "fsdp2" else 4)
        if recomputed < expected:
            problems[name] = f"recomputed {recomputed} times"
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


@pytest.mark.sample("ddp")
@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_bit_equal(engine: str) -> None:
    run_ranks(compare, 2, engine, [*PLANS])
