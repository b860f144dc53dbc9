"""A training step on two GPUs never makes the host wait for a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.gpu.loops import WRAP, Net

import mmfsdp

RANKS = 2


def train(rank: int, store: str, config: dict[str, Any]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS, device_id=device
    )
    model = mmfsdp.shard(Net(256, 4), {"wrap": WRAP, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, 16, device=device)

    def step() -> None:
        with mmfsdp.no_sync(model):
            model(x).float().square().mean().backward()
        model(x).float().square().mean().backward()
        mmfsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # the first step compares gathered copies, and makes what is kept from step to step
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"precision": "bf16", "activation_checkpointing": True},
        {"sharding": {"ignored_parameters": ["head.*"]}},
        {"sharding": "NO_SHARD"},
    ],
    ids=str,
)
def test_no_step_synchronises(tmp_path: Path, config: dict[str, Any]) -> None:
    """Fails if the message of used parameters goes to the device from pageable memory."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs: one rank sends no message")
    mp.spawn(train, (str(tmp_path / "store"), config), nprocs=RANKS)


@pytest.mark.usefixtures("on_cuda")
def test_a_message_to_a_gpu_waits_for_nothing(device: torch.device) -> None:
    """What two ranks do with it, on one GPU: there and back while the debug mode forbids waiting."""
    from mmfsdp.runtime.gradients.agreement import Message

    Message(bytearray(b"\1\2\3"), device, [dist.group.WORLD]).read()  # makes the pinned memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        message = Message(bytearray(b"\1\2\3"), device, [dist.group.WORLD])
        message.has_arrived()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert message.read() == b"\1\2\3"
