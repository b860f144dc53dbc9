"""Restarts by torchrun: new ranks find each other in a store full of dead ones, and the run ends as it would have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.forked_scripts import python

import mmfsdp
from mmfsdp import errors
from mmfsdp.collective.starting import _agree_on_prefix
from mmfsdp.testing import run_ranks, single_rank

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist, mmfsdp
folder, steps, faults = sys.argv[1], 9, sys.argv[2:]
attempt = len(os.listdir(folder + "/attempts"))
mmfsdp.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
dist.barrier()
if rank == 0:
    open(f"{folder}/attempts/{attempt}", "w").close()
print(f"attempt {attempt}: rank {rank} of {ranks} is up", flush=True)
torch.manual_seed(0)
model = mmfsdp.shard(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
fault = faults[attempt] if attempt < len(faults) else "none"
with mmfsdp.CheckpointManager(folder + "/run", model, optimizer, every_steps=2, max_to_keep=1) as manager:
    done = manager.resume()
    for step in range(done + 1, steps + 1):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == done + 3 and rank == attempt % 2:
            if fault != "none":
                os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(0.3)
        manager.step(step)
    manager.save(steps)
weights = mmfsdp.model_state_dict(model, rank0_only=False)
state = mmfsdp.optim_state_dict(model, optimizer, rank0_only=False)
torch.save((weights, state, torch.rand(3)), f"{folder}/end-{rank}")
dist.destroy_process_group()
"""


def torchrun(folder: Path, faults: list[str]) -> str:
    """Run the program under torchrun with a fault in each attempt, and return what it printed."""
    (folder / "attempts").mkdir(parents=True)
    script = folder / "program.py"
    script.write_text(PROGRAM)
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(faults)), "--monitor-interval", "0.1"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [python(), "-m", "torch.distributed.run", *words, str(script), str(folder), *faults],
        env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[:6000]
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_a_run_survives_every_restart_by_torchrun(tmp_path: Path) -> None:
    faults = ["SIGKILL", "SIGTERM"]
    torchrun(tmp_path / "whole", [])
    said = torchrun(tmp_path / "faulty", faults)
    for attempt in range(len(faults) + 1):
        assert all(f"attempt {attempt}: rank {rank} of 2 is up" in said for rank in range(2)), said
    assert re.search(
        r"Leaving with exit code 75, as rank 1 was asked to. Step \d is complete on disk; no step done since", said
    )
    for rank in range(2):
        whole, faulty = (torch.load(tmp_path / run / f"end-{rank}") for run in ("whole", "faulty"))
        torch.testing.assert_close(faulty, whole, rtol=0, atol=0)


def test_ranks_agree_though_the_store_has_keys_of_dead_ones() -> None:
    store, found = dist.HashStore(), {}
    for attempt in range(3):
        for rank in range(3):
            store.set(f"mmfsdp/greeting/{rank}", f"dead {attempt}")

        def join(rank: int, attempt: int = attempt) -> None:
            found[attempt, rank] = _agree_on_prefix(store, rank, 3, timedelta(seconds=20))

        ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    assert len({found[attempt, rank] for attempt in range(3) for rank in range(3)}) == 3
    assert all(found[attempt, 0] == found[attempt, 1] == found[attempt, 2] for attempt in range(3))


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    with pytest.raises(errors.LostRankError, match=r"missing: ranks 1, 2\."):
        _agree_on_prefix(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(errors.LostRankError, match=r"missing: rank 0\."):
        _agree_on_prefix(store, 1, 3, timedelta(seconds=0.1))


def test_wrong_calls_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.ConfigError, match=r"No launcher has started this process .*RANK"):
        mmfsdp.init_process_group("gloo")
    with pytest.raises(errors.ConfigError, match="takes store from the launcher"):
        mmfsdp.init_process_group("gloo", store=dist.HashStore())
    with single_rank(), pytest.raises(errors.ShardStateError, match="initialised already"):
        mmfsdp.init_process_group("gloo")


def shares(rank: int, batch: int, largest: int) -> int | str:
    try:
        return mmfsdp.accumulation_steps(batch, largest)
    except errors.ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("ranks", "batch", "largest", "parts"),
    [(1, 48, 8, 6), (2, 48, 8, 3), (3, 48, 8, 2), (3, 48, 16, 1), (2, 48, 7, 4), (2, 2, 8, 1), (1, 7, 3, 7)],
)
def test_parts_keep_the_global_batch(ranks: int, batch: int, largest: int, parts: int) -> None:
    assert run_ranks(shares, ranks, batch, largest) == [parts] * ranks


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    said = run_ranks(shares, 3, 64, 8)
    assert all("A global batch of 64 cannot be shared by 3 ranks evenly. Run on 2 ranks" in text for text in said)
    assert mmfsdp.accumulation_steps(8, 3) == 4
    with pytest.raises(errors.ConfigError, match="largest=0 is not a whole number of 1 or more"):
        mmfsdp.accumulation_steps(8, 0)
