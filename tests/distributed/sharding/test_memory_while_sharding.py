"""Sharding holds one whole unit at a time, from the meta device and from real weights, with every engine."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.distributed.models import Block
from torch import nn

import mmfsdp
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.sharding import apply as sharding
from mmfsdp.sharding import initialise
from mmfsdp.sharding.agreement import Agreement
from mmfsdp.testing import run_ranks

WRAP = {"kind": "module_name", "patterns": ["blocks.*", "embed", "head"]}
HYBRID = {"strategy": "HYBRID_SHARD", "shard_size": 2}


class Tower(nn.Module):
    """Blocks, an ignored parameter that two of them share, an embedding tied to the head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(5))
        self.blocks[3].up.bias = self.blocks[1].up.bias
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting(initialise.UnitPreparer):
    """Also notes, as each unit begins, the bytes of whole parameters of the units before it that are in memory."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.model = model
        self.whole: list[tuple[weakref.ref[nn.Parameter], tuple[int, int]]] = []
        self.alive: list[int] = []
        counted.append(self)

    def count(self) -> None:
        held = [(storage_of(param), was) for ref, was in self.whole if (param := ref()) is not None]
        self.alive.append(sum(size for (pointer, size), was in held if (pointer, size) == was))

    def __call__(self, unit: ShardUnit, agreed: Agreement) -> None:
        self.count()
        super().__call__(unit, agreed)
        for entry in unit.params:
            param = parameter(self.model, entry.fqn)
            self.whole.append((weakref.ref(param), storage_of(param)))


counted: list[Counting] = []


def parameter(model: nn.Module, fqn: str) -> nn.Parameter:
    named = model.named_parameters(remove_duplicate=False)
    return next(param for name, param in named if name.replace("_fsdp_wrapped_module.", "") == fqn)


def storage_of(param: torch.Tensor) -> tuple[int, int]:
    storage = param.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def whole_bytes_alive(rank: int, config: dict[str, Any], meta: bool, tied: bool) -> tuple[list[int], bool]:
    with torch.device("meta" if meta else "cpu"):
        model: nn.Module = Tower(tied)
    shared = None if meta else model.get_parameter("blocks.1.up.bias")
    sharding.UnitPreparer = Counting  # type: ignore[misc]
    gc.disable()  # memory must not wait for a collection
    try:
        sharded = mmfsdp.shard(model, config)
    finally:
        gc.enable()
        sharding.UnitPreparer = initialise.UnitPreparer  # type: ignore[misc]
    preparer = counted.pop()
    preparer.count()
    bias = parameter(sharded, "blocks.1.up.bias")
    assert shared is None or bias is shared
    still_tied = parameter(sharded, "blocks.3.up.bias") is bias
    return preparer.alive, still_tied and not bias.is_meta


@pytest.mark.sample("fsdp2-meta", "fsdp1-real", "bfloat16-meta", "offload-real", "replicate-real")
@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (2, {}),
        (2, {"cpu_offload": True}),
        (4, {"sharding": HYBRID}),
        (2, {"sharding": "NO_SHARD"}),
        (2, {"engine": "fsdp1"}),
        (2, {"precision": {"storage_dtype": "bfloat16"}}),
    ],
    ids=["fsdp2", "offload", "hybrid", "replicate", "fsdp1", "bfloat16"],
)
def test_no_whole_parameter_outlives_its_unit(meta: bool, world_size: int, config: dict[str, Any]) -> None:
    """Fails if anything keeps a reference to an original parameter; parameters held whole stay tied all the same."""
    ignored = {"ignored_parameters": ["blocks.1.up.bias"]}
    given = config.get("sharding", {})
    chosen = {"strategy": given} if isinstance(given, str) else given
    config = {"wrap": WRAP, **config, "sharding": {**chosen, **ignored}}
    tied = config.get("engine") != "fsdp1"
    for alive, still_tied in run_ranks(whole_bytes_alive, world_size, config, meta, tied):
        assert len(alive) == (7 if tied else 8) + 1
        assert alive == [0] * len(alive)
        assert still_tied
