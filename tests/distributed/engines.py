"""Steps with every engine and strategy: what ranks hold and send, and what a rehearsal says that they do."""

from __future__ import annotations

from typing import Any

import torch
from tests.distributed.measured import Issued, optimizer_of, storage_bytes
from tests.distributed.models import BLOCKS, build
from torch import nn

import mmfsdp

__all__ = ["CONFIGS", "configs_of", "rehearsed_step", "steps"]

HYBRID: dict[str, Any] = {"strategy": "HYBRID_SHARD", "shard_size": 2}
ZERO2 = {"strategy": "_HYBRID_SHARD_ZERO2", "shard_size": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2 in bf16, grad op": {"sharding": "SHARD_GRAD_OP", "precision": "bf16"},
    "fsdp2, nothing sharded": {"engine": "fsdp2", "sharding": "NO_SHARD"},
    "fsdp2, hybrid": {"sharding": HYBRID},
    "fsdp2, hybrid grad op": {"sharding": ZERO2},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1, flat, in bf16": {"engine": "fsdp1", "sharding": {"use_orig_params": False}, "precision": "bf16"},
    "fsdp1, grad op": {"engine": "fsdp1", "sharding": "SHARD_GRAD_OP"},
    "fsdp1, hybrid": {"engine": "fsdp1", "sharding": HYBRID},
    "replicate": {"engine": "replicate"},
}
TOKENS = 6

Step = tuple[dict[str, int], list[tuple[str, int, int, int]]]


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().mean()


def configs_of(ranks: int) -> list[str]:
    """Return the names of the configs that a world of this size can have."""
    return [name for name in CONFIGS if "hybrid" not in name or not ranks % HYBRID["shard_size"]]


def steps(rank: int, names: list[str]) -> list[Step]:
    """Return of the second step with each config what this rank holds, and its collectives."""
    return [step(CONFIGS[name]) for name in names]


def step(config: dict[str, Any]) -> Step:
    model = mmfsdp.shard(build(), {"wrap": BLOCKS, **config})
    optimizer, tokens, issued = optimizer_of(model.parameters()), torch.zeros(TOKENS, dtype=torch.long), Issued()
    for _ in range(2):
        optimizer.zero_grad()
        issued.found.clear()
        with issued:
            loss(model, tokens).backward()
            mmfsdp.clip_grad_norm_(model, 1.0)
            optimizer.step()
    held = {
        "parameter": storage_bytes(model.parameters()),
        "gradient": storage_bytes([param.grad for param in model.parameters() if param.grad is not None]),
        "optimizer state": storage_bytes([value for state in optimizer.state.values() for value in state.values()]),
    }
    messages = [
        (name.removeprefix("c10d::").replace("_", "").removesuffix("base"), nbytes, len(group), stride(group))
        for name, nbytes, group in issued.found
    ]
    return held, messages


def stride(group: list[int]) -> int:
    return group[1] - group[0] if group[1:] else 0


def rehearsed_step(name: str, ranks: int, rank: int) -> Step:
    """Rehearse what `steps` returns of a config on a rank."""
    found = mmfsdp.rehearse(
        {"wrap": BLOCKS, **CONFIGS[name]},
        build(),
        torch.zeros(TOKENS, dtype=torch.long),
        mesh=ranks,
        rank=rank,
        loss=loss,
        optimizer=optimizer_of,
        max_norm=1.0,
        device_type="cpu",
    )
    end = found.at(dict(found.phases)["zero_grad"] - 1).by_kind
    held = {kind: end.get(kind, 0) for kind in ("parameter", "gradient", "optimizer state")}
    return held, [(item.name.replace("_", ""), item.nbytes, item.ranks, item.stride) for item in found.collectives]
