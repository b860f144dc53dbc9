"""An error of one rank ends all of them, whoever started them and their group, and its message is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked_scripts import python
from tests.mmengine_adapter.toy import config

from mmfsdp_mmengine.checkpoints.live_content import safe_globals

ROOT = Path(__file__).parents[2]
FAILING = """
import os

import torch
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS, MODELS
from tests.mmengine_adapter.toy import ToyData, ToyModel


def fail(here):
    if os.environ.get('PLACE') == here and os.environ['RANK'] == '1':
        raise ValueError(f'rank one gives up in {here}')


@HOOKS.register_module()
class FailingHook(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 5:
            fail('hook')


@DATASETS.register_module()
class FailingData(ToyData):
    def __getitem__(self, index):
        if index >= 13:
            fail('data')
        return super().__getitem__(index)


@MODELS.register_module()
class FailingModel(ToyModel):
    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 3:
            fail('forward')
        return super().forward(*args, **kwargs)
"""
# As projects have it. What follows the import is in the config.
TRAIN = """
import argparse

from mmengine.config import Config
from mmengine.runner import Runner

parser = argparse.ArgumentParser()
parser.add_argument('config')
parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
args = parser.parse_args()
cfg = Config.fromfile(args.config)
cfg.launcher = args.launcher
Runner.from_cfg(cfg).train()
"""
# The ranks are forked off a process that has imported everything; errors go through the interpreter's own end.
FORKED = """
import gc
import os
import socket
import sys

import torch.distributed as dist
from mmengine.config import Config
from mmengine.runner import FlexibleRunner, Runner

cases = eval(sys.argv[1])
configs = [Config.fromfile(folder + '/config.py') for folder, *_ in cases]
gc.freeze()
for (folder, place, own_group), cfg in zip(cases, configs):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        os.environ |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free.getsockname()[1]))
    ranks = {}
    for rank in (0, 1):
        pid = os.fork()
        if not pid:
            for stream in (1, 2):
                os.dup2(os.open(f'{folder}/rank{rank}.txt', os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
            os.environ |= dict(PLACE=place, RANK=str(rank), WORLD_SIZE='2', LOCAL_RANK=str(rank))
            if own_group:
                dist.init_process_group('gloo')
            (Runner if cfg.get('launcher') else FlexibleRunner).from_cfg(cfg).train()
            sys.exit()
        ranks[pid] = rank
    codes = {}
    while ranks:
        pid, status = os.wait()
        codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
    print('CODES', codes[0], codes[1], flush=True)
"""
WRAPPER = {"type": "MMFullyShardedDataParallel"}
CASES = {
    "forward": ("forward", 0, {"launcher": "pytorch", "model_wrapper_cfg": WRAPPER}, False),
    "data": ("data", 0, {"launcher": "pytorch", "model_wrapper_cfg": WRAPPER}, True),
    "worker": ("data", 1, {"strategy": {"type": "FSDPStrategy"}}, False),
}


def write_config(folder: Path, workers: int = 0, **changes: Any) -> None:
    """A config of FailingModel with FailingData."""
    settings = config(folder, 2, model={"type": "FailingModel"}, **changes)
    settings["train_dataloader"] |= {"dataset": {"type": "FailingData"}, "num_workers": workers}
    settings["custom_hooks"].append({"type": "FailingHook"})
    settings["custom_imports"] = {"imports": ["mmfsdp_mmengine", "failing"], "allow_failed_imports": False}
    if "strategy" not in changes:
        del settings["strategy"]
    lines = [f"{name} = {value!r}\n" for name, value in settings.items()]
    (folder / "config.py").write_text("".join(lines))


def run(folder: Path, script: str, *args: str, launcher: tuple[str, ...] = (), **variables: str) -> Any:
    (folder / "failing.py").write_text(FAILING)
    (folder / "script.py").write_text(script)
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in own}
    env |= {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path, str(ROOT)]), "OMP_NUM_THREADS": "1", **variables}
    command = [python(), *launcher, str(folder / "script.py"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=85)


@pytest.mark.exhaustive
def test_a_project_s_train_script_under_torchrun(tmp_path: Path, references: Callable[..., dict[str, Any]]) -> None:
    write_config(tmp_path, model_wrapper_cfg=WRAPPER)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, TRAIN, str(tmp_path / "config.py"), "--launcher", "pytorch", launcher=torchrun, PLACE="hook")
    assert done.returncode == 1
    assert "ValueError: rank one gives up in hook" in done.stderr
    # The epoch before it was trained as unsharded, and saved whole.
    with torch.serialization.safe_globals(safe_globals()):
        saved = torch.load(tmp_path / "epoch_1.pth", weights_only=True)
    norms = saved["message_hub"]["log_scalars"]["train/grad_norm"].data[0]
    # Every second iteration has one.
    assert [float(value) for value in norms] == pytest.approx(references()["norms"][:4:2], rel=1e-5)
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_1.pth")
    assert not (tmp_path / "epoch_2.pth").exists()


@pytest.mark.exhaustive
def test_in_forward_and_in_loading_data(tmp_path: Path) -> None:
    cases = []
    for name, (place, workers, changes, own_group) in CASES.items():
        folder = tmp_path / name
        folder.mkdir()
        write_config(folder, workers, **changes)
        cases.append((str(folder), place, own_group))
    done = run(tmp_path, FORKED, repr(cases))
    assert done.stdout.count("CODES 1 1\n") == len(cases), done.stdout + done.stderr
    for folder, place, _ in cases:
        assert f"ValueError: rank one gives up in {place}" in Path(folder, "rank1.txt").read_text()
        assert not [*Path(folder).glob("*.pth")]
