"""Tensor parallelism beside a sharded submodule trains as one process does; inside of it, an error says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.models import Block
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mmfsdp
from mmfsdp.errors import MeshError, PlanError, PlanMismatchError
from mmfsdp.planning import plan
from mmfsdp.rehearsal import rehearse
from mmfsdp.testing import run_ranks

DIM, STEPS, BATCH = 8, 4, 8
STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SIZES = {"kind": "size", "min_num_params": 1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(10, DIM), *(Block(DIM) for _ in range(2)))
        self.head = nn.ModuleDict({"up": nn.Linear(DIM, 4 * DIM), "down": nn.Linear(4 * DIM, 10)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head["down"](F.gelu(self.head["up"](self.body(x))))
        return hidden


def build() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def recorded(rank: int, folder: Path, ranks: int) -> None:
    """Record a few steps: in one process, or on two ranks that shard, times two that divide the head's matrices."""
    model, place, parts = build(), 0, 1
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model.head, mesh["tensor"], STYLES)
        fully_shard(model.head["up"], mesh=mesh["shard"])
        fully_shard(model.head["down"], mesh=mesh["shard"])
        mmfsdp.shard(model.body, {"wrap": {"kind": "module_class", "classes": "Block"}}, mesh["shard"])
        place, parts = mesh["shard"].get_local_rank(), 2
    optimizer = torch.optim.AdamW(
        [{"params": list(model.body.parameters())}, {"params": list(model.head.parameters())}], lr=1e-2
    )
    with mmfsdp.recording(folder, model, optimizer) as recording:
        for step in range(STEPS):
            x, y = torch.randint(0, 10, (2, BATCH), generator=torch.Generator().manual_seed(step))
            loss = F.cross_entropy(model(x.chunk(parts)[place]), y.chunk(parts)[place])
            recording.loss(loss)
            loss.backward()
            mmfsdp.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def test_beside_a_sharded_submodule_it_trains_as_one_process(tmp_path: Path) -> None:
    recorded(0, tmp_path / "1", 1)
    run_ranks(recorded, 4, tmp_path / "4", 4)
    found = mmfsdp.compare(tmp_path / "1", tmp_path / "4", rtol=1e-5)
    assert found.same, str(found)
    kinds = {item.key.kind for item in found.compared if "head" in item.key.name or not item.key.name}
    assert kinds >= {"loss", "norm", "gradient", "update", "state", "parameter"}


def inside(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = build()
    made = plan(model, {"wrap": SIZES}, 2)
    parallelize_module(model.head, mesh["tensor"], STYLES)
    said = r"'head.up.weight' is divided already: a DTensor placed as \(Shard\(dim=0\),\) on \(tensor: 2\)"
    with pytest.raises(PlanError, match=said):
        plan(model, {"wrap": SIZES}, 2)
    with pytest.raises(PlanError, match=said):
        mmfsdp.shard(model, {"wrap": SIZES}, mesh["shard"])
    with pytest.raises(PlanMismatchError, match="made for another model"):
        mmfsdp.apply_plan(model, made, mesh["shard"])
    for config, size in (({"wrap": SIZES}, 2), (made, None)):
        with pytest.raises(PlanError, match=r"divided"):
            rehearse(config, model, torch.zeros(2, dtype=torch.long), mesh=size)
    assert plan(model, {"wrap": SIZES}, 2, ignored_modules=[model.head]).ignored_params  # exempt


def test_inside_of_it_the_axis_is_asked_for() -> None:
    run_ranks(inside, 4, timeout=60)


def meshes(rank: int) -> None:
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor_parallel"))
    model = build()
    hybrid = plan(model, {"wrap": SIZES, "sharding": "HYBRID_SHARD"}, (2, 2))
    for call in (plan, mmfsdp.shard):
        for strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            with pytest.raises(MeshError, match=r"Dimension 'tensor_parallel' of the mesh .*mesh\[\"replicate\"\]"):
                call(build(), {"wrap": SIZES, "sharding": strategy}, other)
    with pytest.raises(MeshError, match="Dimension 'tensor_parallel' of the mesh"):
        mmfsdp.apply_plan(model, hybrid, other)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(PlanError, match="no parameter is divided along 'tensor'"):
        mmfsdp.shard(build(), {"wrap": SIZES}, mesh)
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    assert plan(build(), {"wrap": SIZES}, stages).mesh.sizes() == {"replicate": 1, "shard": 2, "tensor": 1}


def test_axes_are_known_by_their_names() -> None:
    run_ranks(meshes, 4)


def alone(rank: int) -> list[str]:
    """Meshes of one dimension may have any name, and groups of replicas any that does not say otherwise."""
    flat: DeviceMesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    return [
        str(plan(build(), {"wrap": SIZES}, flat).mesh),
        str(plan(build(), {"wrap": SIZES, "sharding": "HYBRID_SHARD"}, pair).mesh),
    ]


def test_other_names_of_meshes_mean_nothing() -> None:
    assert run_ranks(alone, 4) == [["4 ranks", "2 x 2 ranks (replicate x shard)"]] * 4
