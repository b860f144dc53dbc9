"""Rehearsals, `fit` and the plan know a step of Muon: its memory, messages, bytes, FLOPs and time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.rehearsal import Rehearsal, measure
from mmfsdp.testing import run_ranks

WIDTH, DEPTH, MIB = 128, 12, 2**20
MATRIX = 2 * 2 * WIDTH * WIDTH  # bytes of one in bfloat16
PARAMS = DEPTH * 2 * WIDTH * 2 * WIDTH
CONFIG: dict[str, Any] = {"wrap": "Sequential", "optimizer": {"lr": 0.02, "bucket_mib": 1}}


def blocks(depth: int = DEPTH) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(depth))
    )


def messages(rehearsal: Rehearsal) -> list[int]:
    """Return the bytes of each message of the optimizer."""
    found = [item for item in rehearsal.collectives if item.phase == "optimizer"]
    assert {item.name for item in found} <= {"alltoall"}
    return [item.nbytes for item in found]


def flops(rehearsal: Rehearsal) -> int:
    return sum(item.flops for item in rehearsal.operators if item.phase == "optimizer")


def measured(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = measure(CONFIG, blocks(), torch.randn(8, WIDTH), steps=3, device="h100")
    moment = found.rehearsal.peak
    return {
        "rehearsed": moment.nbytes,
        "real": found.peak,
        "phase": moment.phase,
        "held": moment.by_kind["optimizer temporary"],
        "momentum": found.rehearsal.static["optimizer state"],
        "messages": messages(found.rehearsal),
        "flops": flops(found.rehearsal),
    }


@pytest.mark.exhaustive
def test_the_peak_is_shards_and_one_bucket() -> None:
    ranks, buckets = 2, 5
    found = run_ranks(measured, ranks)
    plan = mmfsdp.plan(blocks(), CONFIG, ranks)
    [row] = [line.split() for line in str(plan).splitlines() if line.startswith("muon")]
    for rank in found:
        assert rank["rehearsed"] == pytest.approx(rank["real"], rel=0.05)
        assert rank["phase"] == "optimizer"
        assert rank["held"] <= MIB + 6 * MATRIX  # what the iterations hold of one matrix
        vectors = DEPTH * (2 * WIDTH + WIDTH)
        assert rank["momentum"] == pytest.approx((4 * PARAMS + 8 * vectors) / ranks, rel=0.02)
        assert len(rank["messages"]) == 2 * buckets == int(row[5])
    assert sum(rank["flops"] for rank in found) == pytest.approx(float(row[-1]), rel=0.01)
    # All shards go out, and all come back. A message counts as what a rank sends or receives, whichever is more.
    sent = sum(sum(rank["messages"]) for rank in found)
    assert 2 * 2 * PARAMS <= sent <= 2 * 2 * PARAMS * 1.2


@pytest.mark.exhaustive
def test_rehearsals_without_ranks_forecast_bytes_flops_and_time() -> None:
    batch = torch.empty(8, WIDTH, device="meta")
    found = [mmfsdp.rehearse(CONFIG, blocks(), batch, mesh=4, rank=rank) for rank in (0, 3)]
    for rank in found:
        # A matrix has one owner, and all ranks have equal work here.
        assert 2 * 2 * PARAMS / 4 <= sum(messages(rank)) <= 2 * 2 * PARAMS / 4 * 1.2
        assert flops(rank) == pytest.approx(2 * DEPTH * 5 * 2 * (2 * WIDTH**2 * 2 * WIDTH + WIDTH**3) / 4, rel=0.01)
    adamw = {"wrap": "Sequential", "optimizer": {"muon": None}}
    other = mmfsdp.rehearse(adamw, blocks(), batch, mesh=4)
    assert messages(other) == []
    assert flops(other) == 0
    assert found[0].static["optimizer state"] == pytest.approx(other.static["optimizer state"] / 2, rel=0.05)
    products = flops(found[0]) / 989e12  # the peak of an H100 in bfloat16
    assert in_optimizer(found[0]) > in_optimizer(other) + products


def in_optimizer(rehearsal: Rehearsal) -> float:
    return sum(span.end - span.begin for span in rehearsal.time("h100").spans if span.phase == "optimizer")


@pytest.mark.exhaustive
def test_fit_counts_the_messages_and_the_memory_of_a_bucket() -> None:
    batch = torch.empty(8, WIDTH, device="meta")
    only = {"sharding": ["FULL_SHARD"], "activation_checkpointing": [None], "accumulate": [1], "prefetch": [{}]}
    found = mmfsdp.fit(blocks(), batch, ranks=4, count=1, choices=only, config={**CONFIG, "precision": "fp32"})
    [option] = found.options
    assert len(messages(option.rehearsal)) == 2 * 3
    assert option.rehearsal.peak.phase == "optimizer"
    assert 2 * 2 * PARAMS / 4 < option.rehearsal.peak.by_kind["optimizer temporary"] <= MIB + 6 * MATRIX
