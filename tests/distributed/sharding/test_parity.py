"""The loss curve of a sharded model is that of a single process on the same global batches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.models import BLOCKS, adamw, build, difference, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mmfsdp
from mmfsdp.errors import UnsupportedCallError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.testing import run_ranks

STEPS = 3
TOLERANCE = 1e-5
Curve = list[tuple[float, float]]


@functools.cache
def reference(name: str = "Tied") -> Curve:
    model = build(name)
    return train(model, adamw(model), steps=STEPS, sharded=False)


def sharded_curve(rank: int, name: str, config: dict[str, Any], mesh: str = "") -> tuple[Curve, str]:
    # Ranks start apart: synchronising them is part of what is tested.
    model = mmfsdp.shard(build(name, seed=1 + rank), config, MESHES[mesh]() if mesh else None)
    curve = train(model, adamw(model), steps=STEPS)
    return curve, find_sharded_model(model).plan.engine


def check(world_size: int, name: str, config: dict[str, Any], mesh: str = "") -> str:
    results = run_ranks(sharded_curve, world_size, name, config, mesh)
    for curve, _ in results:
        assert difference(curve, reference(name)) <= TOLERANCE
    return results[0][1]


HYBRID = {"strategy": "HYBRID_SHARD", "shard_size": 2}
HYBRID_ZERO2 = {"strategy": "_HYBRID_SHARD_ZERO2", "shard_size": 2}


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_strategies(engine: str, strategy: str) -> None:
    assert check(2, "Tied", {"engine": engine, "sharding": strategy, "wrap": BLOCKS}) == engine


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("sharding", ["FULL_SHARD", HYBRID, HYBRID_ZERO2], ids=str)
def test_strategies_on_four_ranks(engine: str, sharding: Any) -> None:
    assert check(4, "Tied", {"engine": engine, "sharding": sharding, "wrap": BLOCKS}) == engine


def test_replicate() -> None:
    assert check(2, "Tied", {"sharding": "NO_SHARD", "wrap": BLOCKS}) == "replicate"


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "FULL_SHARD"), (4, "FULL_SHARD"), (2, "SHARD_GRAD_OP")])
def test_flat_parameters(world_size: int, strategy: str) -> None:
    config = {"sharding": {"strategy": strategy, "use_orig_params": False}, "wrap": BLOCKS}
    assert check(world_size, "Tied", config) == "fsdp1"


def test_flat_parameters_hybrid() -> None:
    assert check(4, "Tied", {"sharding": {**HYBRID, "use_orig_params": False}, "wrap": BLOCKS}) == "fsdp1"


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (name, engine)
        for name in ("Conv", "Attention", "Frozen", "FrozenBlock")
        for engine in ("fsdp2", "fsdp1", "replicate")
    ],
)
def test_models(name: str, engine: str) -> None:
    check(2, name, {"engine": engine, "wrap": {"kind": "size", "min_num_params": 60}})


@pytest.mark.parametrize("name", ["Conv", "Attention", "FrozenBlock"])
def test_models_in_flat_parameters(name: str) -> None:
    wrap = BLOCKS if name == "FrozenBlock" else {"kind": "size", "min_num_params": 60}
    check(2, name, {"sharding": {"use_orig_params": False}, "wrap": wrap})


@pytest.mark.parametrize(
    "config",
    [
        {"wrap": {"kind": "none"}},
        {"cpu_offload": True},
        {"sharding": "SHARD_GRAD_OP", "cpu_offload": True},
        {"sharding": {"reshard_after_forward": 2}},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": {"mode": "every_n", "n": 2}},
        {"activation_checkpointing": "full", "engine": "fsdp1"},
        {"prefetch": {"backward": "post", "forward": 2}},
        {"prefetch": {"backward": "none"}},
        {"prefetch": {"backward": "post", "forward": 1}, "engine": "fsdp1"},
        {"prefetch": {"backward": "none"}, "engine": "fsdp1"},
        {"sharding": {"ignored_parameters": ["blocks.*.norm.weight"]}},
        {"sharding": {"ignored_parameters": ["blocks.*.norm.weight"]}, "engine": "fsdp1"},
    ],
    ids=str,
)
def test_settings(config: dict[str, Any]) -> None:
    world_size = 4 if "reshard_after_forward" in config.get("sharding", {}) else 2
    check(world_size, "Tied", {"wrap": BLOCKS, **config})


def one_group() -> Any:
    return dist.new_group(list(range(dist.get_world_size())))


def pair_of_groups() -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    return mesh.get_group(1), mesh.get_group(0)


def mesh_1d() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def mesh_2d() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def mesh_unnamed() -> Any:
    return DeviceMesh("cpu", [[0, 1], [2, 3]])


def mesh_unnamed_1d() -> Any:
    return DeviceMesh("cpu", list(range(dist.get_world_size())))


MESHES = {f.__name__: f for f in (one_group, pair_of_groups, mesh_1d, mesh_2d, mesh_unnamed, mesh_unnamed_1d)}


# Which ranks a mesh has is found before an engine is asked for: the second one gets two of the six.
@pytest.mark.parametrize(
    ("mesh", "engine"),
    [("one_group", "fsdp2"), ("mesh_1d", "fsdp2"), ("mesh_unnamed_1d", "fsdp2"), ("one_group", "fsdp1")],
)
def test_one_dimensional_meshes(engine: str, mesh: str) -> None:
    check(2, "Tied", {"engine": engine, "wrap": BLOCKS}, mesh)


@pytest.mark.parametrize(
    ("mesh", "engine"),
    [("pair_of_groups", "fsdp2"), ("mesh_2d", "fsdp2"), ("mesh_unnamed", "fsdp2"), ("pair_of_groups", "fsdp1")],
)
def test_two_dimensional_meshes(engine: str, mesh: str) -> None:
    check(4, "Tied", {"engine": engine, "sharding": "HYBRID_SHARD", "wrap": BLOCKS}, mesh)


def by_names(rank: int) -> list[Curve]:
    """An axis that replicates makes the strategies hybrid, of a mesh, of its numbers, and of the wrapper class."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    curves = []
    for engine, strategy, hybrid in (
        ("fsdp2", "FULL_SHARD", "HYBRID_SHARD"),
        ("fsdp1", "FULL_SHARD", "HYBRID_SHARD"),
        ("fsdp2", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"),
    ):
        config = {"engine": engine, "sharding": strategy, "wrap": BLOCKS}
        plan = mmfsdp.plan(build(), config, mesh)
        other = mmfsdp.plan(build(), {**config, "sharding": hybrid}, mesh)
        assert plan.units == other.units
        assert plan == mmfsdp.plan(build(), config, plan.mesh) == mmfsdp.plan(build(), config, plan.mesh.axes)
        assert mmfsdp.ShardPlan.model_validate_json(plan.model_dump_json()) == plan
        assert "2 x 2 ranks (replicate x shard)" in str(plan)
        for model in (
            mmfsdp.shard(build(seed=1 + rank), config, mesh),
            mmfsdp.apply_plan(build(seed=1 + rank), plan, mesh),
        ):
            curves.append(train(model, adamw(model), steps=STEPS))
    wrapper = mmfsdp.FullyShardedDataParallel(build(), engine="fsdp1", device_mesh=mesh)
    with pytest.raises(UnsupportedCallError, match=r"no hybrid strategy; .*'FULL_SHARD' on 2 x 2 ranks"):
        wrapper.register_comm_hook(None, print)
    return curves


def test_an_axis_that_replicates_says_what_hybrid_strategies_say() -> None:
    for curve in run_ranks(by_names, 4)[0]:
        assert difference(curve, reference()) <= TOLERANCE


def replicated_over_a_grid(rank: int) -> Curve:
    model = mmfsdp.shard(build(), {"sharding": "NO_SHARD", "wrap": BLOCKS}, mesh_2d())
    return train(model, adamw(model), steps=2)


def test_no_shard_on_a_grid() -> None:
    assert difference(run_ranks(replicated_over_a_grid, 4)[0], reference()[:2]) <= TOLERANCE


def norms(rank: int, engine: str) -> tuple[list[float], list[float]]:
    """The p-norms of gradients, sharded and single, one batch; and the norm after clipping, which must be the limit."""
    results = []
    for sharded in (True, False):
        model = build()
        if sharded:
            model = mmfsdp.shard(model, {"engine": engine, "sharding": HYBRID, "wrap": BLOCKS})
        inputs = torch.arange(8)
        inputs = inputs.chunk(4)[rank] if sharded else inputs
        clip = mmfsdp.clip_grad_norm_ if sharded else lambda m, *a: nn.utils.clip_grad_norm_(m.parameters(), *a)
        found = []
        for norm_type in (2.0, 1.0, 3.0, float("inf")):
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), inputs).backward()
            found.append(float(clip(model, 0.1, norm_type)))
            assert abs(float(clip(model, 1e9, norm_type)) - 0.1) < 1e-5, norm_type
        results.append(found)
    return results[0], results[1]


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_norms_of_any_order(engine: str) -> None:
    for got, want in run_ranks(norms, 4, engine):
        assert got == pytest.approx(want, rel=TOLERANCE)
