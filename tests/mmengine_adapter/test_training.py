"""FlexibleRunner with FSDPStrategy trains as MMEngine's unsharded strategy does, on the same global batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.forked_scripts import python
from tests.mmengine_adapter.toy import strategy, train

from mmfsdp.testing import run_ranks

ROOT = Path(__file__).parents[2]


def check_equal(sharded: dict[str, Any], reference: dict[str, Any]) -> None:
    assert sharded["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert sharded["norms"] == pytest.approx(reference["norms"], rel=1e-5)
    assert sharded["metrics"] == reference["metrics"]
    assert len(sharded["losses"]) == 8
    assert sharded["losses"][-1] < 0.8 * sharded["losses"][0]


class TestParity:
    """AdamW with clipping, accumulation and a schedule."""

    @pytest.mark.sample("2", "2-flat")
    @pytest.mark.parametrize(
        ("world_size", "wrapper"),
        [
            (2, {}),
            (2, {"sharding_strategy": "SHARD_GRAD_OP"}),
            (2, {"sharding_strategy": "NO_SHARD"}),
            (2, {"engine": "fsdp1"}),
            (2, {"use_orig_params": False}),
            (4, {}),
            (4, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": {"mesh_shape": [2, 2]}}),
        ],
        ids=["2", "2-grad-op", "2-replicate", "2-fsdp1", "2-flat", "4", "4-hybrid"],
    )
    def test_losses_norms_and_metrics(
        self, tmp_path: Path, references: Any, world_size: int, wrapper: dict[str, Any]
    ) -> None:
        results = run_ranks(train, world_size, tmp_path, world_size, {"strategy": strategy(**wrapper)})
        assert all(result == results[0] for result in results)
        check_equal(results[0], references())

    def test_replicated_by_ddp(self, tmp_path: Path, references: Any) -> None:
        results = run_ranks(train, 2, tmp_path, 2, {"strategy": {"type": "DDPStrategy"}})
        check_equal(results[0], references())

    @pytest.mark.exhaustive
    def test_activation_checkpointing_changes_nothing(self, tmp_path: Path, references: Any) -> None:
        for checkpointing in ({"check_fn": "tests.mmengine_adapter.test_wrapper.is_block"}, {"mode": "ops"}):
            changes = {"strategy": {**strategy(), "activation_checkpointing": checkpointing}}
            check_equal(run_ranks(train, 2, tmp_path, 2, changes)[0], references())

    @pytest.mark.sample("fsdp1")
    @pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
    def test_batch_norm_trains_and_validates(self, tmp_path: Path, engine: str) -> None:
        changes = {"model": {"type": "ToyModel", "batch_norm": True, "scale": True}}
        results = run_ranks(train, 2, tmp_path, 2, {**changes, "strategy": strategy("local", engine=engine)})
        assert results[0]["losses"] == results[1]["losses"]
        assert results[0]["losses"][-1] < 0.8 * results[0]["losses"][0]
        assert results[0]["metrics"][-1]["count"] == 32


CONFIG = """
custom_imports = dict(imports=['mmfsdp_mmengine', 'tests.mmengine_adapter.toy'], allow_failed_imports=False)
model = dict(type='ToyModel')
work_dir = {work_dir!r}
train_dataloader = dict(
    batch_size={batch_size}, num_workers=0, dataset=dict(type='ToyData'),
    sampler=dict(type='DefaultSampler', shuffle=True), collate_fn=dict(type='default_collate'))
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.05), clip_grad=dict(max_norm=0.5), accumulative_counts=2)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1))
custom_hooks = [dict(type='History')]
env_cfg = dict(dist_cfg=dict(backend='nccl'))
randomness = dict(seed=5)
strategy = dict(
    type='mmengine.FSDPStrategy',
    state_dict_cfg=dict(state_dict_type='FULL_STATE_DICT'),
    model_wrapper=dict(
        auto_wrap_policy=dict(
            type='torch.distributed.fsdp.wrap.transformer_auto_wrap_policy', transformer_layer_cls={{'Block'}})))
"""
SCRIPT = """
import sys
from mmengine.config import Config
from mmengine.runner import FlexibleRunner
runner = FlexibleRunner.from_cfg(Config.fromfile(sys.argv[1]))
assert type(runner.strategy).__module__ == 'mmfsdp_mmengine.strategy', type(runner.strategy)
runner.train()
if runner.rank == 0:
    print('LOSSES', *next(hook for hook in runner.hooks if type(hook).__name__ == 'History').losses)
"""


def run_config(folder: Path, world_size: int, launcher: list[str]) -> tuple[list[float], str]:
    folder.mkdir()
    (folder / "config.py").write_text(CONFIG.format(work_dir=str(folder), batch_size=8 // world_size))
    (folder / "train.py").write_text(SCRIPT)
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in variables}
    env |= {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [python(), *launcher, str(folder / "train.py"), str(folder / "config.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOSSES"))
    return [float(word) for word in line.split()[1:]], done.stdout + done.stderr


class TestConfigFile:
    """A config whose only new line is custom_imports, in a process of its own."""

    @pytest.mark.exhaustive
    def test_without_a_launcher_and_under_torchrun(self, tmp_path: Path) -> None:
        alone, output = run_config(tmp_path / "alone", 1, [])
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        both, _ = run_config(tmp_path / "both", 2, torchrun)
        assert len(alone) == 4
        assert both == pytest.approx(alone, rel=1e-5)
        assert output.count("ShardPlan: fsdp2") == 1, "the plan is logged once"
        assert (tmp_path / "both" / "epoch_1.pth").is_file()
