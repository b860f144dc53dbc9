"""Workers of a data loader outlive signals that others send, and end when their rank ends them or is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.forked_scripts import python
from torch.utils.data import DataLoader, Dataset

import mmfsdp

LEAVES = """
import os, subprocess, torch, mmfsdp
from torch.utils.data import DataLoader
loader = DataLoader(torch.arange(64), batch_size=4, num_workers=2, persistent_workers=True)
mmfsdp.patient_workers(loader)
batches = iter(loader)
next(batches), next(batches)  # one of each worker, which both have begun
for worker in batches._workers:
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
next(batches)
print(*(worker.pid for worker in batches._workers), flush=True)
{end}
"""


class Numbers(Dataset[int]):
    offset = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> int:
        return self.offset + place


def begin(worker: int, *, offset: int) -> None:
    torch.utils.data.get_worker_info().dataset.offset = offset


@pytest.mark.sample("fork-2")
@pytest.mark.parametrize(("kind", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_outlive_signals_of_others(kind: str, workers: int) -> None:
    init = partial(begin, offset=100)
    loader = DataLoader(Numbers(), num_workers=workers, multiprocessing_context=kind, worker_init_fn=init)
    mmfsdp.patient_workers(loader)
    mmfsdp.patient_workers(loader)  # twice is as once
    found = []
    for place, batch in enumerate(loader):
        found.append(batch.item())
        if place == 1:  # all workers have begun
            for child in multiprocessing.active_children():
                for name in ("-TERM", "-USR1"):
                    subprocess.run(["kill", name, str(child.pid)], check=True)
    assert found == list(range(100, 116))  # the loader's own function ran, too


def test_a_loader_without_workers_stays_as_it_is() -> None:
    loader = DataLoader(torch.arange(4))
    mmfsdp.patient_workers(loader)
    assert loader.worker_init_fn is None


@pytest.mark.sample("")
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_workers_end_with_their_rank(end: str, tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(LEAVES.format(end=end))
    done = subprocess.run([python(), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
    deadline = time.monotonic() + 60
    for pid in map(int, done.stdout.split()):
        while _is_alive(pid):
            assert time.monotonic() < deadline, f"worker {pid} still runs"
            time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
