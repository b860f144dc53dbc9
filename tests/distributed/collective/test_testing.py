"""The ranks of mmfsdp.testing end with the process that started them, whichever way that was started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.forked_scripts import python

from mmfsdp.testing import RankError, run_alone, run_ranks

SCRIPT = """
import multiprocessing
import sys

from mmfsdp.testing import run_ranks


def double(rank):
    return 2 * rank


def child():
    print(run_ranks(double, 2), flush=True)


if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    sys.exit(f"{code}")
"""


@pytest.mark.sample("fork-True")
@pytest.mark.parametrize(("method", "forked"), [("fork", True), ("forkserver", False)])
def test_ranks_of_a_child_end_with_it(method: str, forked: bool, tmp_path: Path) -> None:
    """Once in a real Python, which starts a process of its own to fork ranks from."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [python() if forked else sys.executable, script, method]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["[0, 2]"], "0\n")  # gloo of torch 2.9 prints, too


KILLED = """
import os
import signal

from mmfsdp.testing import run_ranks


def pid(rank):
    return os.getpid()


if __name__ == "__main__":
    print(*run_ranks(pid, 2), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes live")
def test_ranks_end_when_the_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    # In a session of its own nobody else continues processes that are paused.
    with (tmp_path / "printed").open("w") as printed:  # a pipe would be open for as long as the ranks live
        subprocess.run([python(), script], stdout=printed, check=False, timeout=120, start_new_session=True)
    pids = [int(word) for word in (tmp_path / "printed").read_text().splitlines()[-1].split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def place(rank: int, number: int) -> tuple[int, int, int, int]:
    assert number < 5, "too many"
    return number, rank, dist.get_world_size(), os.getpid()


def test_jobs_share_processes_that_are_worlds_of_their_own() -> None:
    found = run_alone(place, [(number,) for number in range(5)], at_once=2)
    assert [item[:3] for item in found] == [(number, 0, 1) for number in range(5)]
    assert len({item[3] for item in found}) == 2
    assert run_alone(place, []) == []
    with pytest.raises(RankError, match=r"place failed on rank 0:(.|\n)*too many"):
        run_alone(place, [(1,), (5,)])


def crashing(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(30)


def test_a_rank_that_crashes_tells_the_signal_and_its_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)crashing: rank 1 died of SIGSEGV\. It was here:.* in crashing\n"):
        run_ranks(crashing, 2)
