"""Distributed checkpoints that real ranks wrote, of every sharding: read without torch as torch itself reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.distributed.stock_local import by_name
from torch import nn
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.testing import run_ranks


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6), nn.Linear(6, 3, bias=False))


def sharded(kind: str) -> nn.Module:
    model: nn.Module = toy()
    world_size = dist.get_world_size()
    if kind in ("fsdp1", "fsdp1_flat", "fsdp1_hybrid"):
        mesh: DeviceMesh | None = None
        strategy = ShardingStrategy.FULL_SHARD
        if kind == "fsdp1_hybrid":
            mesh, strategy = init_device_mesh("cpu", (2, world_size // 2)), ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=kind != "fsdp1_flat",
            device_mesh=mesh,
            sharding_strategy=strategy,
        )
    if kind in ("tp", "fsdp2_tp"):
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        # The batch norm keeps whole, plain weights.
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=None), "2": RowwiseParallel()})
        if kind == "fsdp2_tp":
            for name in ("0", "2", "3"):
                fully_shard(model.get_submodule(name), mesh=mesh["dp"])
        return model
    shape, names = ((2, world_size // 2), ("replicate", "shard")) if kind == "hsdp" else ((world_size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save(rank: int, directory: Path, kind: str, writer: str) -> None:
    model = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind not in ("tp", "fsdp2_tp"):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    else:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    content: dict[str, Any] = {"model": weights, "optimizer": state, "epoch": 3}
    if writer == "hugging_face":
        dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True))
    elif writer == "async":
        group = dist.new_group(backend="gloo")
        dcp.async_save(content, checkpoint_id=directory, process_group=group).result()
    else:
        chosen = SerializationFormat.SAFETENSORS if writer == "safetensors" else SerializationFormat.TORCH_SAVE
        threads = 2 if writer == "threads" else 1
        dcp.save(
            content,
            storage_writer=dcp.FileSystemWriter(directory, serialization_format=chosen, thread_count=threads),
        )
    dist.barrier()


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return {*one} == {*two} and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.sample("fsdp2-3-torch", "fsdp1_flat-2-torch", "tp-2-torch", "fsdp1_hybrid-4-torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "world_size", "writer"),
    [
        ("fsdp2", 3, "torch"),
        ("fsdp2", 2, "threads"),
        ("fsdp2", 2, "async"),
        ("hsdp", 4, "torch"),
        ("tp", 2, "torch"),
        ("fsdp2_tp", 4, "torch"),
        ("fsdp1", 3, "torch"),
        ("fsdp1_flat", 2, "torch"),
        ("fsdp1_hybrid", 4, "torch"),
    ],
)
def test_reads_what_torch_reads(tmp_path: Path, kind: str, world_size: int, writer: str) -> None:
    source = tmp_path / "in"
    run_ranks(save, world_size, source, kind, writer)
    layout = open_layout(source)
    assert (layout.format, layout.world_size) == ("dcp", world_size)
    assert any(len(entry.chunks()) > 1 for entry in layout.tensors.values())
    convert(source, tmp_path / "out.pth", keep="all")
    convert(source, tmp_path / "out.safetensors")
    dcp_to_torch_save(source, tmp_path / "torch.pth")
    expected = torch.load(tmp_path / "torch.pth", weights_only=False)
    assert same(by_name(torch.load(tmp_path / "out.pth")), expected)
    assert same(load_file(tmp_path / "out.safetensors"), dict(expected["model"]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2_tp"])
def test_safetensors_writers(tmp_path: Path, kind: str) -> None:
    """Torch cannot read the first of these itself, and saves the same numbers in all of them."""
    world_size = 4 if kind == "fsdp2_tp" else 3
    for writer in ("torch", "safetensors", "hugging_face"):
        run_ranks(save, world_size, tmp_path / writer, kind, writer)
    dcp_to_torch_save(tmp_path / "torch", tmp_path / "torch.pth")
    expected = torch.load(tmp_path / "torch.pth", weights_only=False)
    convert(tmp_path / "safetensors", tmp_path / "out.pth", keep="all")
    assert same(by_name(torch.load(tmp_path / "out.pth")), expected)
    assert open_layout(tmp_path / "hugging_face").format == "safetensors_ranks"
    convert(tmp_path / "hugging_face", tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), dict(expected["model"]))
