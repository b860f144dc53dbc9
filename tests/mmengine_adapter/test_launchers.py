"""Starting under Slurm and Open MPI: the variables that they set, the process group, and training as unsharded."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forked_scripts import run_script
from tests.mmengine_adapter.toy import POLICY, config

from mmfsdp.errors import ConfigError
from mmfsdp_mmengine.processes.distributed import start_process_group
from mmfsdp_mmengine.strategy import FSDPStrategy

ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{rank}", "SLURM_NODELIST": "node[1-2]"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SHARDED = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY}
# The last is MMEngine's default wrapper, whose runner reads LOCAL_RANK.
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "slurm strategy": (SLURM, {"strategy": {"type": "FSDPStrategy", "model_wrapper": SHARDED}}),
    "mpi runner": (MPI, {"launcher": "mpi", "model_wrapper_cfg": SHARDED}),
    "slurm ddp": (SLURM, {"launcher": "slurm"}),
}
# The ranks are forked off a process that has imported everything.
FORKED = """
import gc
import json
import os
import sys

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.runner import FlexibleRunner, Runner

gc.freeze()
for folder, variables in json.loads(sys.argv[1]).items():
    cfg = Config.fromfile(folder + '/config.py')
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            torch.set_num_threads(1)  # before autograd's thread does: two at once abort after a fork (torch 2.15)
            os.environ |= {name: value.format(rank=rank) for name, value in variables.items()}
            if cfg.get('launcher'):
                runner = Runner.from_cfg(cfg)
            else:
                runner = FlexibleRunner.from_cfg(cfg)
            runner.train()
            history = next(hook for hook in runner.hooks if type(hook).__name__ == 'History')
            found = [dist.get_rank(), dist.get_world_size(), runner.rank, os.environ['LOCAL_RANK'],
                     os.environ['MASTER_ADDR'], history.losses]
            open(f'{folder}/rank{rank}.json', 'w').write(json.dumps(found))
            sys.exit()
    print([os.waitpid(pid, 0)[1] for pid in ranks], flush=True)  # what is left to write would be forked, too
"""


def free_port() -> str:
    """Return a port that the system does not give to connections, such as those of tests that run beside this one."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)


@pytest.mark.exhaustive
def test_train_as_unsharded(tmp_path: Path, references: Callable[..., dict[str, Any]]) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostname node[1-2]" ] && printf "localhost\\nnode2\\n"\n')
    scontrol.chmod(0o755)
    started = {}
    for name, (variables, changes) in CASES.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        settings = {**config(folder, 2), "val_dataloader": None, "val_evaluator": None, "val_cfg": None}
        del settings["strategy"]
        settings |= {"custom_imports": {"imports": ["mmfsdp_mmengine", "tests.mmengine_adapter.toy"]}, **changes}
        settings["train_cfg"] = {"by_epoch": True, "max_epochs": 1}
        (folder / "config.py").write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
        started[str(folder)] = {**variables, "MASTER_PORT": free_port()}
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in own and not name.startswith("SLURM")}
    env |= {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{scontrol.parent}{os.pathsep}{env['PATH']}"
    (tmp_path / "script.py").write_text(FORKED)
    done = run_script(tmp_path / "script.py", tmp_path, env, 110, [json.dumps(started)])
    assert done.stdout.count("[0, 0]\n") == len(CASES), f"{done.stdout[-500:]}\n{done.stderr[-3000:]}"
    expected = references()["losses"][:4]
    for folder, variables in started.items():
        for rank in range(2):
            *found, losses = json.loads(Path(folder, f"rank{rank}.json").read_text())
            address = "localhost" if "SLURM_PROCID" in variables else "127.0.0.1"
            assert found == [rank, 2, rank, str(rank), address]
            assert losses == pytest.approx(expected, rel=1e-5)


class TestWhatIsMissing:
    @pytest.mark.parametrize(
        ("launcher", "variables", "message"),
        [
            ("slurm", {}, "launcher 'slurm' sets the environment variable SLURM_PROCID"),
            ("slurm", SLURM, r"'scontrol show hostname node\[1-2\]' failed \(.*Set MASTER_ADDR"),
            ("mpi", {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR is not set"),
            ("torchrun", {}, "launcher must be one of 'pytorch', 'slurm', 'mpi' or 'none', got 'torchrun'"),
        ],
    )
    def test_is_told(
        self, monkeypatch: pytest.MonkeyPatch, launcher: str, variables: dict[str, str], message: str
    ) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", "")
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(rank=0))
        with pytest.raises(ConfigError, match=message):
            start_process_group(launcher)

    @pytest.mark.parametrize("backend", ["ncll", "cpu:gloo,cuda:ncll"])
    def test_unknown_backend(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=r"'ncll' is no backend of torch. Did you mean 'nccl'.* Write 'nccl'"):
            start_process_group("pytorch", backend)

    @pytest.mark.parametrize(
        ("env_cfg", "path", "message"),
        [
            (
                {"dist_cfg": {"timout": 60}},
                "env_cfg.dist_cfg.timout",
                "dist_cfg has no argument 'timout'. Did you mean",
            ),
            ({"dist_cfg": {"rank": 1}}, "env_cfg.dist_cfg.rank", "dist_cfg has no argument 'rank'. The launcher tells"),
            ({"cudnn_benchmarks": True}, "env_cfg.cudnn_benchmarks", "Did you mean 'cudnn_benchmark'"),
            ({"mp_cfg": {"start_method": "spawn"}}, "env_cfg.mp_cfg.start_method", "Accepted: mp_start_method, opencv"),
        ],
    )
    def test_unknown_names(self, tmp_path: Path, env_cfg: dict[str, Any], path: str, message: str) -> None:
        for launcher in ("none", "pytorch"):
            with pytest.raises(ConfigError) as caught:
                FSDPStrategy(work_dir=str(tmp_path), env_kwargs={"launcher": launcher, **env_cfg})
            assert message in caught.value.message
            assert caught.value.context["config"] == path
        if "dist_cfg" in env_cfg:  # as the plain Runner calls it
            with pytest.raises(ConfigError, match=re.escape(message)):
                start_process_group("pytorch", **env_cfg["dist_cfg"])
