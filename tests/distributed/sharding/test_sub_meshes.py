"""A mesh over part of the world, as in pipeline parallelism: each part shards alone, and equals DDP on its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.models import BLOCKS, adamw, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import mmfsdp
from mmfsdp.errors import MeshError
from mmfsdp.runtime.sharded_model import find_sharded_model
from mmfsdp.testing import run_ranks

Weights = dict[str, torch.Tensor]


def two_steps(model: nn.Module, part: int, place: int) -> None:
    """On batches that differ by part and by rank."""
    optimizer = adamw(model)
    for step in range(2):
        generator = torch.Generator().manual_seed(100 * step + 10 * part + place)
        x, y = torch.randint(0, 10, (2, 8), generator=generator)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(model: nn.Module, part: int, place: int) -> Weights:
    """The whole weights after two steps."""
    two_steps(model, part, place)
    return mmfsdp.model_state_dict(model, rank0_only=False)


def trained_by_ddp(group: dist.ProcessGroup, part: int, place: int) -> Weights:
    model = DistributedDataParallel(build("Tied", seed=part), process_group=group)
    two_steps(model, part, place)
    return dict(model.module.state_dict())


def on_a_part(rank: int, shape: dict[str, int], config: dict[str, Any], as_group: bool, alone: bool) -> float:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))["dp"]
    group = mesh.get_group()
    part, place = int(mesh.mesh[0]), mesh.get_local_rank()
    if alone and part:
        return 0.0  # the other parts of the world do something else
    want = trained_by_ddp(group, part, place)
    model = mmfsdp.shard(build("Tied", seed=part), {"wrap": BLOCKS, **config}, group if as_group else mesh)
    got = trained(model, part, place)
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


FAST, SLOW = {"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}
FULL = {"sharding": "FULL_SHARD"}
STRATEGIES: list[dict[str, Any]] = [
    {"sharding": "NO_SHARD"},
    FULL,
    {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    {"sharding": "NO_SHARD", "engine": "fsdp1"},
]


@pytest.mark.sample("hybrid", "fsdp1 replicate")
@pytest.mark.parametrize("config", STRATEGIES, ids=["replicate", "full", "hybrid", "fsdp1 replicate"])
def test_parts_of_the_world_train_at_once_as_ddp_does(config: dict[str, Any]) -> None:
    """Fails, in a hang, if dividing a mesh makes groups that ranks outside of it must make as well."""
    for shape, as_group in ((FAST, True), (SLOW, False), *([(FAST, False), (SLOW, True)] if config == FULL else [])):
        found = run_ranks(on_a_part, 4, shape, config, as_group, False, timeout=60)
        assert max(found) < 1e-6


@pytest.mark.sample("fsdp1-dp slow")
@pytest.mark.parametrize(
    ("engine", "shape"),
    [("fsdp2", {"pp": 2, "dp": 4}), ("fsdp2", {"dp": 4, "pp": 2}), ("fsdp1", {"dp": 4, "pp": 2})],
    ids=["fsdp2-dp fast", "fsdp2-dp slow", "fsdp1-dp slow"],
)
def test_a_part_is_divided_into_replicas_of_shards(shape: dict[str, int], engine: str) -> None:
    config = {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}, "engine": engine}
    found = run_ranks(on_a_part, 8, shape, config, False, False, timeout=120)
    assert max(found) < 1e-6


@pytest.mark.parametrize("config", STRATEGIES[:1])
def test_one_part_alone_shards(config: dict[str, Any]) -> None:
    """The other part of the world never calls."""
    found = run_ranks(on_a_part, 4, {"pp": 2, "dp": 2}, config, False, True, timeout=60)
    assert max(found) < 1e-6


def with_unequal_groups(rank: int) -> bool:
    """Rank 1 is in one more group than the others, as of a user's own making."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))["dp"]
    if rank >= 4:
        return True
    mmfsdp.shard(build("Tied"), {}, mesh)  # nothing is divided
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    model = mmfsdp.shard(build("Tied"), {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}, mesh)
    return find_sharded_model(model).mesh.mesh.tolist() == [[0, 1], [2, 3]]


def test_ranks_in_different_numbers_of_groups_divide_their_mesh() -> None:
    """Fails, in a hang, if groups are not counted alike: torch names a group by how many its process has."""
    assert all(run_ranks(with_unequal_groups, 8))


def groups_of(rank: int, how: str) -> dict[str, list[int]]:
    """2 replicas of 3 shards, given as a pair; the ranks that the sharded model replicates and shards over."""
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    replicate, shard = mesh.get_all_groups()
    config = {"sharding": "HYBRID_SHARD"}
    if how == "shard":
        model: nn.Module = mmfsdp.shard(build("Tied"), config, (replicate, shard))
    elif how == "wrapper":
        model = mmfsdp.FullyShardedDataParallel(
            build("Tied"), process_group=(shard, replicate), sharding_strategy="HYBRID_SHARD"
        )
    else:
        model = mmfsdp.shard(build("Tied"), config, mesh)
    found = find_sharded_model(model).mesh
    return {name: dist.get_process_group_ranks(found.get_group(name)) for name in ("replicate", "shard")}


@pytest.mark.parametrize("how", ["shard", "wrapper", "mesh"])
def test_a_pair_is_replicate_and_shard_but_in_fsdp1s_own_argument(how: str) -> None:
    for rank, found in enumerate(run_ranks(groups_of, 6, how)):
        row = rank // 3 * 3
        assert found == {"replicate": [rank % 3, rank % 3 + 3], "shard": [row, row + 1, row + 2]}


def swapped_pairs(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    replicate, shard = mesh.get_all_groups()
    plan = mmfsdp.plan(build("Tied"), {"sharding": "HYBRID_SHARD"}, (2, 3))
    messages = []
    for action in (
        lambda: mmfsdp.apply_plan(build("Tied"), plan, (shard, replicate)),
        lambda: mmfsdp.shard(
            build("Tied"), {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 3}}, (shard, replicate)
        ),
        lambda: mmfsdp.shard(build("Tied"), {"sharding": "HYBRID_SHARD"}, (shard, shard)),
    ):
        with pytest.raises(MeshError) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_a_swapped_pair_is_named_where_the_numbers_prove_it() -> None:
    for applied, sharded, twice in run_ranks(swapped_pairs, 6):
        assert "Its dimensions are swapped: first comes replicate, then shard." in applied
        assert "The pair is swapped: give (replicate, shard) = (2, 3)." in sharded
        assert "have exactly one rank in common" in twice
