"""Forks the ranks of several jobs, in each of which a rank stops or is slow: see test_stalled_ranks.py.

All jobs run at the same time, as they mostly wait. Each rank's output goes to JOB/RANK.log, and the exit codes to
standard output; that of a rank that is still stopped at the end is null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import mmfsdp
from mmfsdp.testing import single_rank

LIMIT = 3.0  # seconds for which a rank may hold up others
PATIENT = 5.0  # the same in jobs that are healthy, as a busy machine holds ranks up as well
LONGER = 3.0  # seconds by which what is healthy outlasts that: more than it takes to notice and tell a stall


def forget_the_others() -> None:
    time.sleep(60)


def build(engine: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    model = mmfsdp.shard(layers, wrap="Linear", engine=engine)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class SlowState:
    """Takes some seconds to be saved."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, int]:
        time.sleep(self.seconds)
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        pass


def train(job: str, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{job}/store", rank=rank, world_size=ranks)
    model, optimizer = build("fsdp1" if "fsdp1" in job else "fsdp2")
    healthy = job in ("evaluation", "compile", "save")

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    step()  # what only the first one does takes long
    manager = None
    if job == "save":
        state = {"slow": SlowState(PATIENT + LONGER if rank == 1 else 0.0)}
        manager = mmfsdp.CheckpointManager(f"{job}/run", model, grace_seconds=None, state=state)
    with mmfsdp.watch_ranks(model, PATIENT if healthy else LIMIT):
        step()
        step()
        time.sleep(1.0)  # all tell where they are
        if job == "hang" and rank == 1:
            forget_the_others()
        if job == "hang in checkpoint" and rank == 1:
            checkpoint(forget_the_others, use_reentrant=False)  # dynamo's frames are around it, but nothing compiles
        if job == "hang in fsdp1" and rank == 1:
            model.module[2].module.register_forward_pre_hook(lambda *_: forget_the_others())
        if (job == "stopped first" and rank == 0) or (job == "stopped last" and rank == 2):
            os.kill(os.getpid(), signal.SIGSTOP)
        if job == "dead" and rank == 1:
            if os.fork() == 0:  # as a logger or profiler, which survives it
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "dead":
            time.sleep(60)  # no collective notices it
        if job == "evaluation":
            if rank == 0:
                time.sleep(PATIENT + LONGER)  # by one rank, for which all others wait; they are as far
            dist.barrier()
        if job == "compile" and rank == 1:  # others are further
            exec(
                compile("import time; time.sleep(limit)", "/x/torch/_inductor/a.py", "exec"),
                {"limit": PATIENT + LONGER},
            )
        if manager is not None:
            if rank == 0:
                optimizer.step()  # this rank is further, and waits for the one whose state takes long to save
            manager.save(3)
            if rank == 1:
                optimizer.step()
        step()
    print("done", flush=True)
    dist.barrier()


def fork(job: str, rank: int, ranks: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(f"{job}/{rank}.log", "wb") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        train(job, rank, ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    jobs: dict[str, int] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with single_rank():  # what torch does once is done before the forks
        for engine in ("fsdp1", "fsdp2"):
            model, optimizer = build(engine)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        groups = [*dist.distributed_c10d._world.pg_map]  # a rank that freed one would wait for threads it has not
    pids: dict[int, tuple[str, int]] = {}
    for job, ranks in jobs.items():
        Path(job).mkdir()
        pids |= {fork(job, rank, ranks): (job, rank) for rank in range(ranks)}
    codes: dict[str, list[int | None]] = {job: [None] * ranks for job, ranks in jobs.items()}
    deadline = time.monotonic() + 60
    while {name for name, _ in pids.values()} - {"stopped first", "stopped last"} and time.monotonic() < deadline:
        for pid in [*pids]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                job, rank = pids.pop(pid)
                codes[job][rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    print(json.dumps(codes))
    del groups


if __name__ == "__main__":
    main()
