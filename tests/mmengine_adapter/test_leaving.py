"""How processes end: with the exit code of their work, the group left, and no rank waiting for one that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.console_blocks import without_gloo
from tests.forked_scripts import python

ROOT = Path(__file__).parents[2]
# Tensors that Python knows are last held by gloo's threads, which are behind; a mesh keeps the group from being joined.
# Four processes are forked off one that has imported everything, and come to the interpreter's own end at once.
LATE = """
import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmfsdp_mmengine.processes.distributed import start_alone
from mmfsdp_mmengine.processes.leaving import leave_in_order

gc.freeze()
if all(os.fork() for _ in range(4)):
    print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)])
else:
    start_alone()
    leave_in_order()
    mesh = init_device_mesh('cpu', (1,))
    for number in range(200):
        tensor = torch.ones(1000)
        tensor.number = number
        work = dist.all_reduce(tensor, async_op=True)
        del work, tensor
"""
# Two ranks of each case are forked off a process that has imported everything, and come to the interpreter's own end.
# The backends are mixed, as on a GPU. What is registered first runs last.
LEAVING = """
import atexit
import gc
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from mmfsdp_mmengine.processes.leaving import leave_in_order

gc.freeze()
folder, cases = sys.argv[1], json.loads(sys.argv[2])
ranks = {}
code = None
for number, (name, code) in enumerate(cases.items()):
    for rank in range(2):
        pid = os.fork()
        if not pid:
            break
        ranks[pid] = name, rank
    else:
        code = None
        continue
    break
if code is None:
    ended = {name: [None, None] for name in cases}
    for _ in ranks:
        pid, status = os.wait()
        name, rank = ranks[pid]
        ended[name][rank] = os.waitstatus_to_exitcode(status)
    print(json.dumps(ended))
else:
    for stream, name in ((1, 'out'), (2, 'errors')):
        os.dup2(os.open(f'{folder}/{number}-{rank}-{name}.txt', os.O_CREAT | os.O_WRONLY), stream)
    atexit.register(lambda: print('group is left:', not dist.is_initialized(), flush=True))
    dist.init_process_group('cpu:gloo,cuda:gloo', init_method=f'file://{folder}/{number}', rank=rank, world_size=2)
    leave_in_order()
    dist.all_reduce(torch.ones(3))
    last = rank == 1
    exec(code)
"""
# The first rank hosts the store. It stops either at once or after both ranks have met; the other rank must still end.
STOPPED = """
import os
import signal
import socket
import sys

import torch
import torch.distributed as dist

from mmfsdp_mmengine.processes import leaving
from mmfsdp_mmengine.processes.leaving import leave_in_order

with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
host = os.fork()
rank = 1 if host else 0
dist.init_process_group('gloo', init_method=f'tcp://localhost:{port}', rank=rank, world_size=2)
leave_in_order()
dist.all_reduce(torch.ones(3))
script, when = sys.argv[1:]
if not rank:
    if when == 'at once':
        os.kill(os.getpid(), signal.SIGSTOP)
    leaving._have_threads_finished = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit()
if when == 'at once':
    os.waitpid(host, os.WUNTRACED)
print(host, flush=True)
exec(script)
"""
FAILS = "if last: raise ValueError('it fails')\n"
CASES: dict[str, tuple[str, list[int]]] = {
    "all is well": ("", [0, 0]),
    "an exit code": ("sys.exit(3)", [3, 3]),
    "one is late": ("time.sleep(1.5 * last)", [0, 0]),
    "one left before": ("last and dist.destroy_process_group()", [0, 0]),
    "one has an exit code": ("if last: sys.exit(3)\ndist.barrier()", [1, 3]),
    "one fails while the other waits": (f"{FAILS}dist.barrier()", [1, 1]),
    "one fails while the other ends": (FAILS, [0, 1]),
    "one is killed": ("if last: os.kill(os.getpid(), signal.SIGKILL)", [0, -signal.SIGKILL]),
    "one is interrupted": ("if last: raise KeyboardInterrupt\ndist.barrier()", [1, -signal.SIGINT]),
}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "OMP_NUM_THREADS": "1"}


def test_threads_that_are_late_do_not_abort_the_process() -> None:
    command = [python(), "-c", LATE]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=110)
    assert (without_gloo(done.stdout), done.stderr) == (["[0, 0, 0, 0]"], "")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "when", "code"),
    [("", "at once", 0), ("raise ValueError('it fails')", "at once", 1), ("", "when ranks have met", 0)],
)
def test_who_hosts_the_store_may_have_stopped(script: str, when: str, code: int) -> None:
    with subprocess.Popen(
        [python(), "-c", STOPPED, script, when],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        host = next(int(line) for line in process.stdout if line.strip().isdigit())
        try:
            assert process.wait(30) == code  # the group's own timeout is 30 minutes
        finally:
            os.kill(host, signal.SIGKILL)


@pytest.mark.exhaustive
def test_processes_end_as_their_work_did(tmp_path: Path) -> None:
    scripts = {name: script for name, (script, _) in CASES.items()}
    command = [python(), "-c", LEAVING, str(tmp_path), json.dumps(scripts)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=110)
    assert json.loads(done.stdout) == {name: codes for name, (_, codes) in CASES.items()}
    for number, (_, codes) in enumerate(CASES.values()):
        for rank, code in enumerate(codes):
            lines = (tmp_path / f"{number}-{rank}-errors.txt").read_text().splitlines()
            # torch says of a group of mixed backends that it does not know its hooks.
            errors = [line for line in lines if "hasHooks" not in line]
            assert not any("Exception ignored" in line for line in errors)
            if code in (0, 3):
                assert errors == []
                said = (tmp_path / f"{number}-{rank}-out.txt").read_text()
                assert without_gloo(said) == ["group is left: True"]
