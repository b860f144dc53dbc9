"""Restarts by torchrun: new ranks find each other in a store full of dead ones, and the run ends as it would have."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Self

import pytest
import torch
import torch.distributed as dist
from tests.distributed.restarted import train
from tests.forked_scripts import python

import mmfsdp
from mmfsdp import errors
from mmfsdp.collective.elastic_start import _agree_on_prefix
from mmfsdp.testing import run_ranks, single_rank

PROGRAM = Path(__file__).parents[1].joinpath("restarted.py")
STEPS = 16


def whole_run(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    train(folder, STEPS)


class Agents:
    """Processes of torchrun, each with its ranks, which end with this context."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, list[subprocess.Popen[bytes]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.running:
            agent.kill()
            agent.wait()

    def start(self, *words: str, **own: str) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **own}
        words = ("--max-restarts", "9", "--monitor-interval", "0.1", *words, str(PROGRAM), str(self.folder), str(STEPS))
        with (self.folder / "log").open("ab") as log:
            command = [python(), "-m", "torch.distributed.run", *words]
            self.running.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True))
        return self.running[-1]

    def lines(self, rank: int) -> list[list[int]]:
        """What a rank wrote in each step: the step, the number of ranks, and samples."""
        file = self.folder / f"order-{rank}"
        return [[*map(int, line.split())] for line in file.read_text().splitlines()] if file.exists() else []

    def await_step(self, step: int, ranks: int) -> None:
        """Wait until a number of ranks has done a step."""
        deadline = time.monotonic() + 200
        while not any(line[0] >= step and line[1] == ranks for line in self.lines(0)):
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-6000:]
            time.sleep(0.05)


def samples(folder: Path) -> dict[int, list[int]]:
    """The samples of each step in the order of all ranks together: of n ranks, each has every n-th."""
    by_rank = []
    for file in sorted(folder.glob("order-?")):
        lines = [[*map(int, line.split())] for line in file.read_text().splitlines()]
        by_rank.append({step: (ranks, own) for step, ranks, *own in lines})
    return {
        step: [sample for row in zip(*(of[step][1] for of in by_rank[:ranks]), strict=True) for sample in row]
        for step, (ranks, _) in by_rank[0].items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(whole_run, 2, str(folder))
    return folder


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_survives_a_restart_by_torchrun(whole: Path, tmp_path: Path) -> None:
    with Agents(tmp_path) as agents:
        agent = agents.start("--standalone", "--nproc-per-node", "2", AGENT="only")
        agents.await_step(8, ranks=2)
        kill_rank(tmp_path, "only")
        assert agent.wait(120) == 0, (tmp_path / "log").read_text()[-6000:]
    assert samples(tmp_path) == samples(whole)
    for rank in range(2):
        ends = [torch.load(folder / f"end-{rank}") for folder in (tmp_path, whole)]
        torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_agents_that_come_and_without_those_that_leave(whole: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
    words += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf"]
    words += ["last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"]
    # torchrun's store of one attempt would not be found by an agent that comes later.
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Agents(tmp_path) as agents:
        first = agents.start(*words, AGENT="first", **own)
        agents.await_step(4, ranks=1)
        second = agents.start(*words, AGENT="second", **own)
        agents.await_step(8, ranks=2)
        second.kill()
        kill_rank(tmp_path, "second")
        assert first.wait(120) == 0, (tmp_path / "log").read_text()[-6000:]
    assert [ranks for ranks, _ in groupby(line[1] for line in agents.lines(0))] == [1, 2, 1]
    assert samples(tmp_path) == samples(whole)
    ends = [torch.load(folder / "end-0")[:2] for folder in (tmp_path, whole)]
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


def kill_rank(folder: Path, agent: str) -> None:
    """Kill a rank of an agent; the run, which waits, may go on."""
    os.kill(int((folder / f"process-of-{agent}").read_text()), signal.SIGKILL)
    (folder / "go-on").touch()


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
