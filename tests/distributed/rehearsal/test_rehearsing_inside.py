"""A job that runs can rehearse another one, on one rank alone, and measure its own: its ranks stay together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mmfsdp
from mmfsdp.errors import RankMismatchError, RehearsalError
from mmfsdp.rehearsal import measure
from mmfsdp.rehearsal.fakes.worlds import alone
from mmfsdp.testing import run_ranks

WRAP = {"wrap": {"kind": "module_class", "classes": "Linear"}}
HYBRID = {**WRAP, "sharding": {"strategy": "HYBRID_SHARD"}}
BATCH = torch.ones(2, 8)


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def trained(rank: int, *, rehearses: bool) -> tuple[list[int], list[Any]]:
    """Return what each rehearsal of this rank found, and the weights after three steps."""
    model = mmfsdp.shard(net(), WRAP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        model(BATCH).square().mean().backward()
        if rehearses and rank == step % 2:  # between backward and the step, on one rank
            found += inside(rank)
        mmfsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found, [param.full_tensor().tolist() for param in model.parameters()]


def inside(rank: int) -> list[int]:
    step = mmfsdp.rehearse(HYBRID, net(), BATCH, mesh=(2, 4), device_type="cpu")
    with pytest.raises(RehearsalError):
        mmfsdp.rehearse(None, net(), torch.ones(2, 9))
    with alone():
        dist.all_reduce(torch.ones(1))
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.append(dist.get_world_size()))
        thread.start()
        thread.join()
        assert (dist.get_world_size(), others) == (1, [2])  # a save in the background keeps its world
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    return [step.peak.nbytes, len(step.collectives)]


def measured(rank: int) -> tuple[int, int, str, float]:
    found = measure(WRAP, net(), BATCH, steps=3, max_norm=1.0, accumulate=2, budget=1e-3)
    with pytest.raises(RankMismatchError):
        measure(WRAP, nn.Linear(8, 8 + rank), BATCH, device="cpu")
    return found.rehearsal.peak.nbytes, found.peak, found.rehearsal.mesh, found.predicted.seconds


def both(rank: int) -> tuple[Any, ...]:
    plain, beside = trained(rank, rehearses=False), trained(rank, rehearses=True)
    return plain[1] == beside[1], beside[0], measured(rank)


@pytest.mark.exhaustive
def test_ranks_stay_together() -> None:
    step = mmfsdp.rehearse(HYBRID, net(), BATCH, mesh=(2, 4), device_type="cpu")
    expected = [step.peak.nbytes, len(step.collectives)]
    (same, first, whole), (also, second, other) = run_ranks(both, 2)
    assert same
    assert also
    assert (first, second) == (2 * expected, expected)
    for predicted, peak, mesh, seconds in (whole, other):
        assert peak == pytest.approx(predicted, rel=0.2)  # gloo may keep a copy for a moment
        assert mesh == "2 ranks"
        assert seconds > 0
