"""Configs and checkpoints of the last ten releases of MMEngine: read with restricted pickles, and resumed sharded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import FlexibleRunner, Runner
from safetensors.torch import load_file
from tests.mmengine_adapter.releases.make import HERE, RELEASES

from mmfsdp.checkpoint import convert, verify
from mmfsdp.frontends import read_config
from mmfsdp.testing import run_ranks

WRAPPER = {
    "type": "MMFullyShardedDataParallel",
    "auto_wrap_policy": {"type": "ModuleWrapPolicy", "module_classes": ["Linear"]},
}


def test_ten_releases_wrote_files() -> None:
    assert len(RELEASES) == 10
    assert sorted(path.name for path in HERE.iterdir() if path.is_dir() and path.name[0].isdigit()) == sorted(RELEASES)


@pytest.mark.parametrize("release", RELEASES)
def test_converted(release: str, tmp_path: Path) -> None:
    path = HERE / release / "epoch_2.pth"
    whole = torch.load(path, weights_only=False)
    assert whole["meta"]["mmengine_version"].startswith(release)  # and a hash
    assert verify(path).ok
    # MMEngine's hook saves the averages as the model's weights, and the trained weights as the averages.
    for options, part in (
        ({"keep": "model"}, "state_dict"),
        ({"keep": "model", "use_ema": True}, "state_dict"),
        ({"keep": "ema_state_dict", "strip_prefix": "module."}, "ema_state_dict"),
    ):
        convert(path, tmp_path / "part.safetensors", overwrite=True, **options)
        found = load_file(tmp_path / "part.safetensors")
        expected = {name.removeprefix("module."): value for name, value in whole[part].items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def resumed(rank: int, folder: Path, release: str, runner: str) -> None:
    sys.path.insert(0, str(HERE))  # where the project is
    cfg = Config.fromfile(HERE / "config.py")
    cfg.custom_imports.imports.append("mmfsdp_mmengine")
    cfg.work_dir = str(folder)
    cfg.train_dataloader.batch_size //= 2
    cfg.load_from, cfg.resume = str(HERE / release / "epoch_2.pth"), True
    cfg.experiment_name = f"{release} {runner}"
    __import__("mmfsdp_mmengine")
    __import__("project")
    if runner == "FlexibleRunner":
        cfg.strategy = {"type": "FSDPStrategy", "model_wrapper": WRAPPER}
        FlexibleRunner.from_cfg(cfg).train()
    else:
        cfg.launcher, cfg.model_wrapper_cfg = "pytorch", WRAPPER
        Runner.from_cfg(cfg).train()


# Every release with one runner, in turn; the oldest and the newest with both.
RUNNERS = ("FlexibleRunner", "Runner")
PAIRS = [(release, RUNNERS[place % 2]) for place, release in enumerate(RELEASES)]
PAIRS += [(RELEASES[0], "Runner"), (RELEASES[-1], "FlexibleRunner")]


@pytest.mark.sample("0.10.7-Runner", "0.9.0-Runner", "0.10.4-FlexibleRunner")
@pytest.mark.parametrize(("release", "runner"), PAIRS)
def test_resumed_on_two_ranks(release: str, runner: str, tmp_path: Path) -> None:
    run_ranks(resumed, 2, tmp_path, release, runner)
    uninterrupted, found = (json.loads((path / "losses.json").read_text()) for path in (HERE / release, tmp_path))
    assert [*found] == ["4", "5"]
    assert found == pytest.approx({name: uninterrupted[name] for name in found}, rel=1e-5)


def test_read_by_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    config = read_config(HERE / "config.py")
    assert type(config.model()).__name__ == "TinyModel"
    assert config.optimizer() == "adamw"
