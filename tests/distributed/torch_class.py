"""torch's own FullyShardedDataParallel beside ours, on the same model and data: what tests compare."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.models import Block, build
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import mmfsdp

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1-flat": {"use_orig_params": False},
    "replicate": {"sharding_strategy": "NO_SHARD"},
}


def plain(seed: int = 1) -> nn.Module:
    """Return a model with tied weights and units below the root, which torch's class can shard."""
    model: Any = build(seed=seed)
    model.scale = nn.Parameter(torch.ones(1))  # torch's class accepts no scalars
    return model


def ours(name: str, seed: int = 1) -> Any:
    return mmfsdp.FullyShardedDataParallel(plain(seed), auto_wrap_policy=ModuleWrapPolicy({Block}), **ENGINES[name])


def torchs(seed: int = 1, **arguments: Any) -> TorchFSDP:
    """Return torch's own, with flat parameters: with the original ones its optimizer states are wrong on a CPU."""
    return TorchFSDP(
        plain(seed), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **arguments
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, number: int = 0) -> float:
    """Train one step on this rank's part of a batch; without an optimizer, only run backward."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(0, 10, (2, 8), generator=generator)
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = F.cross_entropy(model(x.chunk(size)[rank]), y.chunk(size)[rank])
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@contextmanager
def torch_settles() -> Iterator[None]:
    """Ignore what torch says about its own deprecated methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def close(got: Any, want: Any) -> None:
    """Check that nested values are the same, tensors up to rounding, with the same keys in any order."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            close(got[key], want[key])
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            close(one, other)
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    else:
        assert got == want
