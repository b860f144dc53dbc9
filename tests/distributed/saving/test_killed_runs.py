"""A run whose ranks are killed at random moments, again and again, ends as one that never stopped, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import verify
from mmfsdp.testing import RankError, run_ranks

STEPS = 20
KILLS = 3


def train(rank: int, folder: str | None, kind: str, delay: float, victims: tuple[int, ...]) -> Any:
    """Train to the end; ranks among the victims die ``delay`` seconds after the manager began to look for files."""
    torch.manual_seed(0)
    model = mmfsdp.shard(nn.Sequential(nn.Linear(64, 128), nn.Dropout(), nn.Linear(128, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    if rank in victims:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()

    def step() -> None:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if folder is None:
        for _ in range(STEPS):
            step()
    else:
        with mmfsdp.CheckpointManager(folder, model, optimizer, every_steps=1, max_to_keep=2, kind=kind) as manager:
            for number in range(manager.resume() + 1, STEPS + 1):
                step()
                time.sleep(0.01)
                manager.step(number)
    if victims:
        time.sleep(60)  # it was faster than its death
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    return weights, mmfsdp.optim_state_dict(model, optimizer, rank0_only=False), torch.rand(4)


@pytest.mark.sample("local")
@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_a_killed_run_resumes_exactly(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    whole = run_ranks(train, 2, None, kind, 0.0, ())
    for _ in range(KILLS):
        victims = chance.choice([(0,), (1,), (0, 1)])
        with pytest.raises(RankError):
            run_ranks(train, 2, str(tmp_path), kind, chance.uniform(0.0, 0.7), victims)
        # Whatever has a checkpoint's name is whole.
        assert all(verify(path).ok for path in tmp_path.glob("step_*"))
        assert not list(tmp_path.glob("*.damaged*"))
    resumed = run_ranks(train, 2, str(tmp_path), kind, 0.0, ())
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run.json", f"step_{STEPS - 1}", f"step_{STEPS}"}  # nothing hidden is left
