"""A process whose work is done ends with exit code 0, however late gloo's threads let go of what they sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Tensors that Python knows are last held by gloo's threads, which are behind; a mesh keeps the group from being joined.
LATE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmfsdp_mmengine.distributed import leave_in_order, start_alone

start_alone()
leave_in_order()
mesh = init_device_mesh('cpu', (1,))
for number in range(200):
    tensor = torch.ones(1000)
    tensor.number = number
    work = dist.all_reduce(tensor, async_op=True)
    del work, tensor
"""


def test_threads_that_are_late_do_not_abort_the_process() -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LATE]
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [(process.communicate()[1], process.returncode) for process in running]
    assert ended == [("", 0)] * 4
