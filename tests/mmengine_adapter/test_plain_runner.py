"""MMEngine's plain Runner with `model_wrapper_cfg`: trains as unsharded, checkpoints, resumes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import Runner
from tests.mmengine_adapter.test_training import check_equal
from tests.mmengine_adapter.toy import POLICY, History, ToyModel, config

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import MMFullyShardedDataParallel
from mmfsdp_mmengine.checkpoints.live_content import safe_globals

_runs = itertools.count()
OPTIM = {
    "optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.05},
    "paramwise_cfg": {"norm_decay_mult": 0.0, "flat_decay_mult": 0.3, "custom_keys": {"blocks.0": {"lr_mult": 0.5}}},
    "clip_grad": {"max_norm": 0.5},
    "accumulative_counts": 2,
}
FSDP2: dict[str, Any] = {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": POLICY}
FSDP1 = {**FSDP2, "engine": "fsdp1"}


def settings_of(folder: Path, world_size: int, wrapper: Any, **changes: Any) -> Config:
    settings = config(folder, world_size, **{"optim_wrapper": OPTIM, **changes})
    del settings["strategy"]
    launcher = "pytorch" if world_size > 1 else "none"
    name = f"plain{next(_runs)}"
    return Config({**settings, "launcher": launcher, "model_wrapper_cfg": wrapper, "experiment_name": name})


def history_of(runner: Runner) -> dict[str, Any]:
    history = next(hook for hook in runner.hooks if isinstance(hook, History))
    return {"losses": history.losses, "norms": history.norms, "metrics": history.metrics}


def train(rank: int, folder: Path, world_size: int, wrapper: Any, changes: dict[str, Any]) -> dict[str, Any]:
    settings = settings_of(folder, world_size, wrapper, **changes)
    before = settings.to_dict()
    with torch.serialization.safe_globals(safe_globals()):  # for the stock runner
        runner = Runner.from_cfg(settings)
        runner.train()
    assert settings.to_dict() == before
    assert isinstance(runner.model, MMFullyShardedDataParallel) == (wrapper is not None)
    return history_of(runner)


ONE_EPOCH = {"train_cfg": {"by_epoch": True, "max_epochs": 1, "val_interval": 1}}


class TestRunner:
    @pytest.mark.sample("fsdp1")
    @pytest.mark.parametrize("wrapper", [FSDP2, FSDP1], ids=["fsdp2", "fsdp1"])
    def test_trains_saves_and_resumes(self, tmp_path: Path, wrapper: dict[str, Any]) -> None:
        [plain] = run_ranks(train, 1, tmp_path / "plain", 1, None, {})
        results = run_ranks(train, 2, tmp_path / "sharded", 2, wrapper, {})
        assert results[0] == results[1]
        check_equal(results[0], plain)

        # In plain PyTorch, where the optimizer of the plain model takes its state.
        with torch.serialization.safe_globals(safe_globals()):
            saved = torch.load(tmp_path / "sharded" / "epoch_2.pth", weights_only=True)
            stock = torch.load(tmp_path / "plain" / "epoch_2.pth", weights_only=True)
        MODELS.build({"type": "ToyModel"}).load_state_dict(saved["state_dict"])
        assert stock.keys() - saved.keys() == set()
        assert [group["params"] for group in saved["optimizer"]["param_groups"]] == [
            group["params"] for group in stock["optimizer"]["param_groups"]
        ]
        for place, state in stock["optimizer"]["state"].items():
            torch.testing.assert_close(
                saved["optimizer"]["state"][place]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-6
            )

        whole = results[0]
        again = {"resume": True, "load_from": str(tmp_path / "sharded" / "epoch_1.pth")}
        for result in run_ranks(train, 2, tmp_path / "again", 2, wrapper, again):
            assert result["losses"] == whole["losses"][4:]
            assert result["norms"] == whole["norms"][-4:]
            assert result["metrics"] == whole["metrics"][1:]
        # Back in the unsharded runner, and from it.
        [back] = run_ranks(train, 1, tmp_path / "back", 1, None, again)
        assert back["losses"] == pytest.approx(whole["losses"][4:], rel=1e-5)


@MODELS.register_module(force=True)
class SlowlyBuilt(ToyModel):
    """Takes longer to build than the names of directories tell apart."""

    def __init__(self) -> None:
        time.sleep(1.1)
        super().__init__()


@pytest.mark.exhaustive
def test_logs_are_in_one_directory(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, 2, FSDP2, {"model": {"type": "SlowlyBuilt"}})
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [folder.name for folder in folders] == [path.stem for folder in folders for path in folder.glob("*.log")]


def validate_then_train(rank: int, folder: Path, wrapper: dict[str, Any]) -> dict[str, Any]:
    runner = Runner.from_cfg(settings_of(folder, 2, wrapper, **ONE_EPOCH))
    first = runner.val()
    runner.train()
    runner.val()
    return {**history_of(runner), "first": first}


class TestOrder:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize("wrapper", [FSDP2, FSDP1], ids=["fsdp2", "fsdp1"])
    def test_training_after_validation_and_amp(self, tmp_path: Path, wrapper: dict[str, Any]) -> None:
        alone = run_ranks(train, 2, tmp_path / "alone", 2, wrapper, ONE_EPOCH)[0]
        result = run_ranks(validate_then_train, 2, tmp_path / "both", wrapper)[0]
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["metrics"] == [result["first"], *alone["metrics"], alone["metrics"][-1]]

        amp = {**OPTIM, "type": "AmpOptimWrapper", "dtype": "bfloat16", "use_fsdp": True}
        half = run_ranks(train, 2, tmp_path / "amp", 2, wrapper, {**ONE_EPOCH, "optim_wrapper": amp})[0]
        assert half["losses"] != alone["losses"]
        assert half["losses"] == pytest.approx(alone["losses"], rel=3e-2)
