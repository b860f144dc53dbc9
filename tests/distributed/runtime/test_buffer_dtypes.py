"""Buffers of every dtype, also those that gloo cannot send: sharded, kept alike, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mmfsdp
from mmfsdp.basics.text import clean_fqn
from mmfsdp.collective.broadcasting import broadcast_tensor
from mmfsdp.runtime.ranks.buffers import broadcast_buffers
from mmfsdp.testing import run_ranks

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


class Buffers(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        for dtype in DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.full((3, 2), value, dtype=torch.float32).to(dtype))
        self.register_buffer("turned", torch.full((2, 3), value).t())
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("scalar", torch.tensor(value, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def same(model: nn.Module, value: int) -> list[str]:
    want = dict(Buffers(value).named_buffers())
    return [
        name
        for name, buffer in model.named_buffers()
        if buffer.dtype != want[clean_fqn(name)].dtype
        or not torch.equal(buffer.to(torch.complex128), want[clean_fqn(name)].to(torch.complex128))
    ]


def through_all(rank: int, world_size: int, engine: str, folder: str) -> list[list[str]]:
    mesh = None
    sharding = {"strategy": "HYBRID_SHARD", "shard_size": 2} if world_size == 4 else "FULL_SHARD"
    model = mmfsdp.shard(Buffers(rank), {"engine": engine, "sharding": sharding}, mesh)
    found = [same(model, 0)]
    for buffer in model.buffers():
        buffer.copy_(torch.full(buffer.shape, rank + 1).to(buffer.dtype))
    broadcast_buffers(model)
    found.append(same(model, 1))
    names = dict(model.named_buffers())
    for kind in ("full", "local", "sharded"):
        mmfsdp.save_checkpoint(f"{folder}/{kind}", model, kind=kind)
        for buffer in names.values():
            buffer.zero_()
        mmfsdp.load_checkpoint(f"{folder}/{kind}", model)
        found.append(same(model, 1))
    whole = mmfsdp.model_state_dict(model)
    mmfsdp.load_model_state_dict(model, whole, from_rank0=True)
    found.append(same(model, 1))
    return found


@pytest.mark.sample("2-fsdp1")
@pytest.mark.parametrize(("world_size", "engine"), [(2, "fsdp2"), (4, "fsdp2"), (2, "fsdp1")])
def test_every_dtype(tmp_path: Path, world_size: int, engine: str) -> None:
    """Fails if a tensor is broadcast as it is: "Invalid scalar type"."""
    for found in run_ranks(through_all, world_size, world_size, engine, str(tmp_path)):
        assert found == [[]] * len(found)


def sent(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype in DTYPES:
        for shape in ((), (5,), (2, 0), (3, 4)):
            value = torch.full(shape, rank + 1).to(dtype)
            broadcast_tensor(value, mesh)
            assert torch.equal(value.to(torch.complex128), torch.full(shape, 1).to(dtype).to(torch.complex128))
    turned = torch.full((3, 4), rank).t()
    broadcast_tensor(turned[1:], mesh)
    assert turned.tolist() == [[rank] * 3, *[[0] * 3] * 3]
    assert dist.get_rank() == rank


def test_a_tensor_of_any_form_is_broadcast() -> None:
    run_ranks(sent, 4)
