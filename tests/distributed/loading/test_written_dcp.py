"""DCP directories that were written without torch: real ranks load them with torch's own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from mmfsdp.checkpoint import convert
from mmfsdp.testing import run_ranks


def plain(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(24.0).reshape(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def load(rank: int, directory: Path, truth: Path, engine: str) -> None:
    model, _ = plain(1)
    world_size = dist.get_world_size()
    if engine == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        sizes = (2, world_size // 2) if engine == "hsdp" else (world_size,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    weights, state = get_state_dict(model, optimizer)
    content = {"state_dict": weights, "optimizer": state, "epoch": 0}
    dcp.load(content, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=content["state_dict"], optim_state_dict=content["optimizer"])
    assert content["epoch"] == 4
    expected = torch.load(truth, weights_only=True)
    found, found_state = get_state_dict(model, optimizer)
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(whole(found[name]), tensor), name
    names = [name for name, _ in plain(1)[0].named_parameters()]
    for place, name in enumerate(names):
        for key, value in expected["optimizer"]["state"][place].items():
            assert torch.equal(whole(found_state["state"][name][key]), value), (name, key)
    assert [group["lr"] for group in found_state["param_groups"]] == [0.01]


def whole(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, ShardedTensor):  # of FSDP1 without a mesh
        gathered = torch.empty(value.size()) if dist.get_rank() == 0 else None
        value.gather(0, gathered)
        objects = [gathered]
        dist.broadcast_object_list(objects)
        assert objects[0] is not None
        return objects[0]
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.sample("3-fsdp2-2", "4-fsdp1-2")
@pytest.mark.parametrize(
    ("ranks", "engine", "world_size"),
    [(1, "fsdp2", 2), (3, "fsdp2", 2), ("2x2", "hsdp", 4), (4, "fsdp1", 2), (1, "fsdp1", 2)],
)
def test_torch_loads_what_was_written(tmp_path: Path, ranks: int | str, engine: str, world_size: int) -> None:
    model, optimizer = plain(0)
    step(model, optimizer)
    content = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}
    torch.save(content, tmp_path / "full.pth")
    convert(tmp_path / "full.pth", tmp_path / "dcp", to="dcp", ranks=ranks)
    run_ranks(load, world_size, tmp_path / "dcp", tmp_path / "full.pth", engine)
