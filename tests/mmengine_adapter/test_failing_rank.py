"""An error of one rank ends all of them under torchrun, and its message is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = """
custom_imports = dict(imports=['mmfsdp_mmengine', 'tests.mmengine_adapter.toy'], allow_failed_imports=False)
model = dict(type='ToyModel')
work_dir = {work_dir!r}
train_dataloader = dict(
    batch_size=4, num_workers=0, dataset=dict(type='ToyData'),
    sampler=dict(type='DefaultSampler', shuffle=True), collate_fn=dict(type='default_collate'))
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.01))
custom_hooks = [dict(type='Fails')]
strategy = dict(type='FSDPStrategy')
"""
SCRIPT = """
import sys
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import FlexibleRunner

@HOOKS.register_module()
class Fails(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 1 and runner.rank == 1:
            raise ValueError("rank one gives up")

FlexibleRunner.from_cfg(Config.fromfile(sys.argv[1])).train()
"""


def test_an_error_in_a_hook_of_one_rank(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG.format(work_dir=str(tmp_path)))
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in variables}
    env |= {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(tmp_path / "train.py"), str(tmp_path / "config.py")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=85,
    )
    assert done.returncode == 1
    assert "ValueError: rank one gives up" in done.stderr
