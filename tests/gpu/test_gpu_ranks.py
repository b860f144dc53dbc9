"""Two ranks with NCCL train, save, resume and update as one process does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.gpu.loops import WRAP, Net
from tests.gpu.ranks import run
from torch import nn

import mmfsdp

RANKS, STEPS, BATCH = 2, 4, 32
MUON = {"muon": "auto", "lr": 0.01, "adamw": {"lr": 1e-3}}


def train(
    model: nn.Module, optimizer: Any, device: torch.device, rank: int, ranks: int, first: int, steps: int
) -> list[tuple[float, float]]:
    """Train on this rank's part of each batch; return the loss of the whole batch, and the norm, of each step."""
    found = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, 16, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
        for half in range(2):
            inputs, labels = (part.chunk(2)[half].chunk(ranks)[rank].to(device) for part in (x, y))
            with mmfsdp.no_sync(model) if ranks > 1 and half == 0 else contextlib.nullcontext():
                loss = F.cross_entropy(model(inputs).float(), labels) / 2
                loss.backward()
        sharded = dist.is_initialized()
        norm = mmfsdp.clip_grad_norm_(model, 1.0) if sharded else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def sharded(rank: int, device: torch.device, config: dict[str, Any], folder: str, kind: str) -> Any:
    """Train, save in the background, and go on."""
    model = mmfsdp.shard(Net(), {"wrap": WRAP, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = train(model, optimizer, device, rank, RANKS, 0, STEPS)
    path = f"{folder}/saved.pth" if kind == "full" else f"{folder}/saved"
    pending = mmfsdp.save_checkpoint(path, model, optimizer, kind=kind, blocking=False)
    after = train(model, optimizer, device, rank, RANKS, STEPS, STEPS)
    pending.result()
    return before, after, mmfsdp.model_state_dict(model)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "sharded"),
        ({}, "full"),
        ({}, "local"),
        ({"engine": "fsdp1"}, "sharded"),
        ({"engine": "replicate"}, "sharded"),
        ({"sharding": "NO_SHARD"}, "sharded"),
        ({"activation_checkpointing": {"mode": "ops", "offload": True}}, "sharded"),
        ({"cpu_offload": True}, "sharded"),
    ],
    ids=str,
)
def test_trains_as_one_process_does(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    (before, after, weights), _ = run(sharded, RANKS, config, str(tmp_path), kind)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = train(model, optimizer, device, 0, 1, 0, 2 * STEPS)
    assert [norm for _, norm in before + after] == pytest.approx([norm for _, norm in wanted], rel=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value.cpu(), rtol=1e-4, atol=1e-5)


def resumed(rank: int, device: torch.device, folder: str) -> Any:
    """Load what two ranks saved."""
    model = mmfsdp.shard(Net(), {"wrap": WRAP})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _, report = mmfsdp.load_checkpoint(f"{folder}/saved", model, optimizer)
    assert report.clean
    return train(model, optimizer, device, rank, RANKS, STEPS, STEPS)


def test_resumes_exactly(tmp_path: Path) -> None:
    (_, wanted, _), _ = run(sharded, RANKS, {}, str(tmp_path), "sharded")
    assert run(resumed, RANKS, str(tmp_path))[0] == wanted


def stepped(rank: int, device: torch.device, config: dict[str, Any]) -> Any:
    """Update with the optimizer of the plan."""
    model = mmfsdp.shard(Net(), {"wrap": WRAP, "optimizer": config})
    found = train(model, mmfsdp.build_optimizer(model), device, rank, dist.get_world_size(), 0, STEPS)
    return found, mmfsdp.model_state_dict(model)


def test_muon_on_two_ranks_is_that_on_one() -> None:
    (_, one), (_, two) = run(stepped, 1, MUON)[0], run(stepped, RANKS, MUON)[0]
    for name, value in one.items():
        assert (two[name] - value).norm() <= 5e-3 * value.norm(), name  # it iterates in bfloat16


def recorded(rank: int, device: torch.device, folder: str) -> Any:
    """Train while everything is recorded."""
    ranks = dist.get_world_size()
    model = mmfsdp.shard(Net(), {"wrap": WRAP})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mmfsdp.recording(folder, model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(BATCH, 16, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
            inputs, labels = (part.chunk(ranks)[rank].to(device) for part in (x, y))
            F.cross_entropy(model(inputs).float(), labels).backward()
            mmfsdp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def test_records_of_one_rank_and_of_two_are_the_same(tmp_path: Path) -> None:
    run(recorded, 1, str(tmp_path / "one"))
    run(recorded, RANKS, str(tmp_path / "two"))
    found = mmfsdp.compare(tmp_path / "one", tmp_path / "two")
    assert found.same, str(found)
