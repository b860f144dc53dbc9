"""Optimizers in a rehearsal compute on shards as DTensor would let them, operator by operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.rehearsal.recording import recorder

UNEVEN = {"sharding": {"strategy": "FULL_SHARD"}}
HYBRID = {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}


@pytest.mark.parametrize(
    ("optimizer", "config"),
    [("adamw", UNEVEN), ("adamw", HYBRID), ("sgd-momentum", UNEVEN), ("adagrad", UNEVEN), ("rmsprop-centered", HYBRID)],
)
def test_operators_on_shards_are_those_that_dtensor_runs(
    optimizer: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of four ranks has no part of the smaller parameter."""
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5)), torch.randn(4, 8)
    taken: list[str] = []
    on_shards = recorder.on_shards

    def noted(func: Any, args: Any) -> Any:
        found = on_shards(func, args)
        taken.extend([func._schema.name] if found is not None else [])
        return found

    steps = []
    for replacement in (noted, lambda *_: None):
        monkeypatch.setattr(recorder, "on_shards", replacement)
        steps.append(mmfsdp.rehearse(config, model, batch, mesh=4, rank=3, max_norm=1.0, optimizer=optimizer))
    mine, torchs = steps
    assert taken
    assert mine.operators == torchs.operators
    assert mine.allocations == torchs.allocations
    assert mine.static["optimizer state"] > 0
