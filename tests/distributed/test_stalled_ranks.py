"""Ranks that stop: all others name the rank, its host, step, unit and stack, and end; whoever is only slow goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forked_scripts import python
from torch import nn

import mmfsdp
from mmfsdp import errors
from mmfsdp.runtime.stalled_ranks import Judge, Whereabouts
from mmfsdp.testing import single_rank

RANKS = 3
PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist, mmfsdp
folder, what, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
model = mmfsdp.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)), wrap="Linear")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def forget_the_others():
    time.sleep(60)

def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

limit = 6.0 if what == "healthy" else 3.0  # a busy machine may hold up a healthy rank as well
step()  # what only the first one does takes long
with mmfsdp.watch_ranks(model, limit):
    step()
    step()
    time.sleep(1.0)  # all tell where they are
    if what == "hang" and rank == 1:
        forget_the_others()
    if what == "stopped first" and rank == 0 or what == "stopped last" and rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "dead" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "dead":
        time.sleep(60)  # no collective notices it
    if what == "healthy":
        if rank == 0:
            time.sleep(limit + 2.0)  # an evaluation by one rank; all others wait, and are as far
        dist.barrier()
        if rank == 1:  # others are further, but this rank compiles
            exec(compile("import time; time.sleep(limit + 2.0)", "/x/torch/_inductor/a.py", "exec"))
    step()
print("done", flush=True)
dist.barrier()
os._exit(0)
"""


def start(folder: Path, what: str) -> list[subprocess.Popen[str]]:
    folder = folder / what
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [python(), str(script), str(folder), what, str(rank), str(RANKS)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int | None, str]]]:
    """The exit code of each rank in each scenario and what it printed; a rank that was stopped has neither."""
    folder, found = tmp_path_factory.mktemp("stalls"), {}
    # All at once: most of the time they sleep.
    jobs = {what: start(folder, what) for what in ("hang", "stopped first", "stopped last", "dead", "healthy")}
    deadline = time.monotonic() + 150
    for what, ranks in jobs.items():
        stopped = {"stopped first": 0, "stopped last": 2}.get(what)
        found[what] = []
        for rank, process in enumerate(ranks):
            if rank == stopped:
                found[what].append((None, ""))
                continue
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            found[what].append((process.returncode, out + err))
        for process in ranks:
            process.kill()
            process.communicate()
    return found


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("hang", 1, ["forget_the_others", "between an optimizer step and the next shard unit, after 2 steps"]),
        ("stopped first", 0, ["It answers to nothing: it is stopped", "after 2 steps"]),
        ("stopped last", 2, ["It answers to nothing: it is stopped", "after 2 steps"]),
        ("dead", 1, ["It has ended, or failed.", "after 2 steps"]),
    ],
)
def test_all_others_name_the_rank_that_stops(
    what: str, rank: int, said: list[str], outcomes: dict[str, list[tuple[int | None, str]]]
) -> None:
    for other, (code, text) in enumerate(outcomes[what]):
        if other == rank and what != "hang":
            continue
        assert code == 75, (other, code, text)
        assert f"Rank {rank} on host {os.uname().nodename!r} is" in text, text
        assert all(part in text for part in said), text
        assert f"Stacks of rank {other} on host" in text
        assert "program.py" in text.partition("Stacks of")[2], text


def test_slow_evaluations_and_compilers_are_no_stalls(outcomes: dict[str, list[tuple[int | None, str]]]) -> None:
    for code, text in outcomes["healthy"]:
        assert (code, "done" in text) == (0, True), text


def at(progress: int, *, busy: bool = False) -> Whereabouts:
    return Whereabouts("host", progress, 0, "computing", busy)


def test_only_who_holds_up_others_is_stalled() -> None:
    judge = Judge(3, 10.0, 0.0)
    for now in range(0, 8):
        for rank in range(3):
            judge.hear(rank, at(5), now)
    assert judge.stalled(7.0) == []
    for now in range(8, 30):
        judge.hear(0, at(7), now)
        judge.hear(1, at(6), now)  # waits for 2, as 0 does
        judge.hear(2, at(5, busy=now < 25), now)
        assert judge.stalled(now) == ([2] if now >= 25 else []), now
    assert judge.stalled(41.0) == [0, 1, 2]  # nobody has told anything since
    judge.hear(0, at(7), 41.0)
    judge.hear(1, at(6), 41.0)
    assert judge.stalled(41.0) == [2]


def test_a_slow_rank_is_named_once_per_window() -> None:
    judge, named = Judge(2, 1e9, 0.0), []
    for now in range(200):
        judge.hear(0, at(now), now)
        judge.hear(1, at(now if now % 4 == 0 else now - 1), now)
        named.append(judge.slow())
    assert [now for now, rank in enumerate(named) if rank is not None] == [59, 119, 179]
    assert set(named) == {None, 1}


def test_wrong_limits_are_refused() -> None:
    with single_rank():
        model = mmfsdp.shard(nn.Linear(2, 2))
        for wrong in (0, -1.0, float("inf"), True):
            with pytest.raises(errors.ConfigError, match="is not a positive number of seconds"):
                mmfsdp.watch_ranks(model, wrong)
        with mmfsdp.watch_ranks(model, 0.5):
            time.sleep(1.2)
