"""What a plan says a rank holds is what the rank holds, to the byte, however uneven the shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.distributed.models import build
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import mmfsdp
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.testing import run_ranks

Shape = tuple[int, ...]


class Holder(nn.Module):
    """A module with parameters of given shapes."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype) -> None:
        super().__init__()
        for place, shape in enumerate(shapes):
            self.register_parameter(f"p{place}", nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def held_and_planned(rank: int, model: nn.Module, config: dict[str, Any]) -> tuple[int, int]:
    sharded = mmfsdp.shard(model, config)
    plan = find_sharded_model(sharded).plan
    if plan.engine == "fsdp1":
        # A shard may be padding alone, with no parameter to show for it.
        flat = [
            unit._flat_param for unit in FullyShardedDataParallel.fsdp_modules(sharded) if unit._flat_param is not None
        ]
        whole = [param for param in sharded.parameters() if param.dim() == 0 and param.numel()]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in [*flat, *whole]
        }
        return sum(storages.values()), plan.param_bytes(rank)
    local = [param.to_local() if isinstance(param, DTensor) else param for param in sharded.parameters()]
    return sum(tensor.numel() * tensor.element_size() for tensor in local), plan.param_bytes(rank)


def all_configs(rank: int, shapes: list[list[Shape]], dtype: str) -> list[tuple[int, int]]:
    found = []
    for config in CONFIGS:
        strategy = config.get("sharding", {}).get("strategy")
        if strategy == "HYBRID_SHARD" and dist.get_world_size() != 4:
            continue
        model = nn.Sequential(*(Holder(part, getattr(torch, dtype)) for part in shapes))
        found.append(held_and_planned(rank, model, {"wrap": {"kind": "module_class", "classes": "Holder"}, **config}))
    return found


CONFIGS: list[dict[str, Any]] = [
    {"engine": "fsdp2"},
    {"engine": "fsdp1"},
    {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
    {"sharding": {"strategy": "NO_SHARD"}},
    {"engine": "fsdp1", "sharding": {"strategy": "NO_SHARD"}},
    {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    {"engine": "fsdp1", "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    {"precision": "bf16-pure"},
    {"engine": "fsdp1", "precision": "bf16"},
]

shapes = st.lists(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


@pytest.mark.sample("3")
@pytest.mark.parametrize("world_size", [2, 3, 4])
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(parts=shapes, dtype=st.sampled_from(["float32", "bfloat16"]))
def test_any_shapes(world_size: int, parts: list[list[Shape]], dtype: str) -> None:
    for rank, pairs in enumerate(run_ranks(all_configs, world_size, parts, dtype)):
        for place, (held, planned) in enumerate(pairs):
            assert held == planned, (rank, place)


def whole_models(rank: int) -> list[tuple[int, int]]:
    wrap = {"kind": "size", "min_num_params": 40}
    return [
        held_and_planned(rank, build(name), {"engine": engine, "wrap": wrap})
        for name in ("Tied", "Conv", "Attention", "Frozen")
        for engine in ("fsdp2", "fsdp1", "replicate")
    ]


@pytest.mark.sample("2")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_models(world_size: int) -> None:
    for pairs in run_ranks(whole_models, world_size):
        assert [held for held, _ in pairs] == [planned for _, planned in pairs]
