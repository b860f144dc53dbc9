"""Every line that the diagnosis advises is pasted into the config, which then trains as the unsharded model does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config
from mmengine.dist import all_reduce, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import FlexibleRunner, Runner
from tests.mmengine_adapter.toy import UNSHARDED, config, runner_of

from mmfsdp.errors import ConfigError
from mmfsdp.frontends import read_config
from mmfsdp.testing import run_ranks, single_rank

RANKS = 2
IMPORTS = "custom_imports = dict(imports=['mmfsdp_mmengine', 'tests.mmengine_adapter.test_advice'])\n"
OURS = "strategy = dict(type='FSDPStrategy', model_wrapper=dict(auto_wrap_policy=dict(type='ModuleWrapPolicy', "
OURS += "module_classes=['Block'])))\n"
FLEXIBLE = "runner_type = 'FlexibleRunner'\n"
WRAPPER = "strategy['model_wrapper']"
DEEPSPEED = """
runner_type = 'FlexibleRunner'
strategy = dict(
    type='DeepSpeedStrategy',
    gradient_clipping=0.5,
    gradient_accumulation_steps=2,
    inputs_to_half=['inputs'],
    zero_optimization=dict(stage=3, overlap_comm=True, offload_param=dict(device='cpu')))
optim_wrapper = dict(type='DeepSpeedOptimWrapper', optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.05))
model_wrapper_cfg = dict(type='MMDeepSpeedEngineWrapper')
"""
HALF = "strategy.update(fp16=dict(enabled=True, loss_scale=0, initial_scale_power=8, loss_scale_window=500))\n"
EXACT, HALF_PRECISION, TRAINS = 1e-4, 3e-2, None

# Lines of a config, how near its losses are to those of the unsharded model, or that it trains otherwise.
CONFIGS: dict[str, tuple[str, float | None]] = {
    "shards nothing": ("", EXACT),
    "DDP": ("model_wrapper_cfg = dict(type='MMDistributedDataParallel', find_unused_parameters=True)\n", EXACT),
    "DeepSpeed": (DEEPSPEED, EXACT),
    "DeepSpeed, stage 2": (DEEPSPEED.replace("stage=3", "stage=2"), EXACT),
    "DeepSpeed, float16": (DEEPSPEED + HALF, HALF_PRECISION),
    "DeepSpeed, bfloat16": (DEEPSPEED + "strategy.update(config=dict(bf16=dict(enabled=True)))\n", HALF_PRECISION),
    "DeepSpeed's optimizer": (DEEPSPEED + "optim_wrapper['optimizer'].update(type='FusedAdam')\n", EXACT),
    "ColossalAI": (
        FLEXIBLE + "strategy = dict(type='ColossalAIStrategy', plugin='lowlevel-zero', mixed_precision='bf16')\n"
        "optim_wrapper.update(type='ColossalAIOptimWrapper')\n",
        HALF_PRECISION,
    ),
    "what DeepSpeed leaves": (
        FLEXIBLE + OURS + f"optim_wrapper = dict(type='DeepSpeedOptimWrapper', **optim_wrapper)\n"
        f"{WRAPPER}['type'] = 'MMDeepSpeedEngineWrapper'\n",
        EXACT,
    ),
    "no import": (FLEXIBLE + OURS + "custom_imports = dict(imports=['tests.mmengine_adapter.test_advice'])\n", EXACT),
    "late import": (
        FLEXIBLE + OURS + "custom_imports = dict(imports=['tests.mmengine_adapter.test_advice', "
        "'mmfsdp_mmengine'], allow_failed_imports=True)\n",
        EXACT,
    ),
    "plain Runner": (OURS, EXACT),
    "without a launcher": (
        "model_wrapper_cfg = dict(type='MMFullyShardedDataParallel', auto_wrap_policy='auto')\n",
        EXACT,
    ),
    "no policy": (FLEXIBLE + "strategy = dict(type='FSDPStrategy')\n", EXACT),
    "flat parameters": (
        FLEXIBLE + OURS + f"{WRAPPER}['use_orig_params'] = False\n"
        "optim_wrapper['paramwise_cfg'] = dict(norm_decay_mult=1.0, custom_keys=dict(fc1={}))\n",
        EXACT,
    ),
    "hybrid": (FLEXIBLE + OURS + f"{WRAPPER}['sharding_strategy'] = 'HYBRID_SHARD'\n", EXACT),
    "no weights": (FLEXIBLE + OURS + "strategy['skip_init_weights'] = True\n", EXACT),
    "no scaler": (FLEXIBLE + OURS + f"{WRAPPER}['mixed_precision'] = 'fp16'\n", HALF_PRECISION),
    "two dtypes": (
        FLEXIBLE + OURS + f"{WRAPPER}['mixed_precision'] = 'bf16'\n"
        "optim_wrapper.update(type='AmpOptimWrapper', dtype='float16')\n",
        HALF_PRECISION,
    ),
    "apex": (FLEXIBLE + OURS + "optim_wrapper.update(type='ApexOptimWrapper', opt_level='O1')\n", HALF_PRECISION),
    "LBFGS": (FLEXIBLE + OURS + "optim_wrapper['optimizer'] = dict(type='LBFGS', lr=1, history_size=3)\n", TRAINS),
    "Muon": (FLEXIBLE + OURS + "optim_wrapper['optimizer'] = dict(type='MuonWithAdamW', lr=0.01)\n", TRAINS),
    "batch norm": (FLEXIBLE + OURS + "model['batch_norm'] = True\n", TRAINS),
    "batch norm in half": (
        FLEXIBLE + OURS + "model['batch_norm'] = True\n"
        f"{WRAPPER}['mixed_precision'] = dict(param_dtype='bfloat16', _module_classes_to_ignore=[])\n",
        TRAINS,
    ),
}


@HOOKS.register_module(force=True)
class WritesLosses(Hook):
    """Writes the loss of every iteration, averaged over ranks."""

    def __init__(self, path: str) -> None:
        self.path, self.losses = path, []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        loss = outputs["loss"].detach().clone().float()
        all_reduce(loss, "mean")
        self.losses.append(loss.item())
        if is_main_process():
            Path(self.path).write_text(json.dumps(self.losses))


def settings(folder: Path, ranks: int) -> dict[str, Any]:
    """A short run, without what writes files."""
    given = config(folder / "work", ranks)
    del given["strategy"], given["param_scheduler"]
    given["default_hooks"] = {"checkpoint": None, "logger": None}
    given["custom_hooks"] = [{"type": "WritesLosses", "path": str(folder / "losses.json")}]
    given["train_cfg"] = {"by_epoch": True, "max_epochs": 1, "val_interval": 9}
    given["launcher"] = "none"
    return given


def diagnosed(path: Path) -> Any:
    return read_config(path).diagnose((1, RANKS))


def trained(rank: int, paths: list[Path]) -> None:
    for path in paths:
        cfg = Config.fromfile(path)
        cfg.experiment_name = path.parent.name
        kind = FlexibleRunner if cfg.get("runner_type") == "FlexibleRunner" else Runner
        kind.from_cfg(cfg).train()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("truth")
    runner_of({**settings(folder, 1), "strategy": UNSHARDED, "launcher": "none"}).train()
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


PYTHON_STYLE = """from mmengine._strategy.deepspeed import DeepSpeedOptimWrapper, DeepSpeedStrategy
from mmengine._strategy import FSDPStrategy as OtherStrategy
from tests.mmengine_adapter import test_advice
"""
OF_PYTHON_STYLE = {
    "DeepSpeed": DEEPSPEED.replace("'DeepSpeedStrategy'", "DeepSpeedStrategy").replace(
        "'DeepSpeedOptimWrapper'", "DeepSpeedOptimWrapper"
    ),
    "no import": FLEXIBLE + OURS.replace("'FSDPStrategy'", "OtherStrategy"),
}
INHERITED = ("DeepSpeed, float16", "what DeepSpeed leaves", "LBFGS", "apex", "two dtypes", "batch norm in half")


def paste_all(path: Path) -> None:
    """Paste what is advised until nothing is."""
    for _ in range(4):
        advice = [item.advice for item in diagnosed(path).findings if item.advice]
        if not advice:
            break
        path.write_text("\n".join([path.read_text(), *advice]))
    left = [item for item in diagnosed(path).findings if item.level in ("error", "warning")]
    assert left == [], path.read_text()


@pytest.mark.exhaustive
def test_pasted_and_trained(tmp_path: Path, truth: list[float]) -> None:
    cases = [("one file", name, IMPORTS + lines) for name, (lines, _) in CONFIGS.items()]
    cases += [("inherited", name, IMPORTS + CONFIGS[name][0]) for name in INHERITED]
    cases += [("in Python style", name, lines) for name, lines in OF_PYTHON_STYLE.items()]
    paths = []
    for style, name, lines in cases:
        folder = tmp_path / f"{name}, {style}"
        folder.mkdir()
        head = PYTHON_STYLE if style == "in Python style" else ""
        text = head + "".join(f"{key} = {value!r}\n" for key, value in settings(folder, RANKS).items()) + lines
        path = folder / "config.py"
        if style == "inherited":
            (folder / "base.py").write_text(text)
            text = "_base_ = ['base.py']\n"
        path.write_text(text)
        paste_all(path)
        paths.append(path)
    run_ranks(trained, RANKS, paths, timeout=300)
    for path in paths:
        tolerance = CONFIGS[path.parent.name.rpartition(", ")[0]][1]
        losses = json.loads((path.parent / "losses.json").read_text())
        assert len(losses) == len(truth)
        if tolerance is None:
            assert losses[-1] < losses[0], path.read_text()
        else:
            assert losses == pytest.approx(truth, rel=tolerance), path.read_text()


def test_classes_of_other_strategies_are_refused_where_they_crashed(tmp_path: Path) -> None:
    given = settings(tmp_path, 1)
    for changes, message in (
        (
            {"optim_wrapper": {**given["optim_wrapper"], "type": "DeepSpeedOptimWrapper"}},
            "DeepSpeedOptimWrapper works with DeepSpeedStrategy only. With FSDPStrategy write type='OptimWrapper'",
        ),
        (
            {"strategy": {"type": "FSDPStrategy", "model_wrapper": {"type": "MMDeepSpeedEngineWrapper"}}},
            "got MMDeepSpeedEngineWrapper. Use the strategy of its library with that wrapper.",
        ),
    ):
        settings_of_run = {**given, "strategy": {"type": "FSDPStrategy"}, **changes}
        settings_of_run["optim_wrapper"] = {
            key: value
            for key, value in settings_of_run["optim_wrapper"].items()
            if "type" not in changes.get("optim_wrapper", {}) or key in ("type", "optimizer")
        }
        with single_rank(), pytest.raises(ConfigError, match=re.escape(message)):
            runner_of(settings_of_run).train()


BROKEN = "default_scope = 'broken_zoo'\nmodel = dict(type='Detector')\n"


@pytest.mark.parametrize(
    ("files", "text", "message"),
    [
        (
            {"__init__.py": "raise ImportError('libcudart.so.11.0: cannot open shared object file')"},
            BROKEN,
            "that package is installed, and importing it failed with ImportError: libcudart.so.11.0",
        ),
        (
            {"__init__.py": "import absent_package"},
            BROKEN,
            "importing it failed with ModuleNotFoundError: No module named 'absent_package'. Install the package that",
        ),
        (
            {"__init__.py": "raise ImportError('no driver')"},
            "model = dict(type='broken_zoo.Detector')",
            "The scope of the name is 'broken_zoo': that package is installed, and importing it failed with Imp",
        ),
        ({"__init__.py": ""}, BROKEN, "but that package has no module broken_zoo.registry, which makes a scope of it."),
        (
            {},
            BROKEN.replace("broken_zoo", "mmdet3d"),
            "but that package is not installed (pip install mmdet3d).",
        ),
        (
            {},
            BROKEN.replace("broken_zoo", "absent_zoo"),
            "default_scope is 'absent_zoo', but no module of that scope is imported.",
        ),
    ],
)
def test_packages_that_fail_are_not_called_missing(
    files: dict[str, str],
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if files:
        (tmp_path / "broken_zoo").mkdir()
    for name, content in files.items():
        (tmp_path / "broken_zoo" / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_zoo", raising=False)
    (tmp_path / "config.py").write_text(text)
    said = " ".join(item.here for item in diagnosed(tmp_path / "config.py").findings)
    assert message in said
    assert ("pip install" in said) == ("pip install" in message)
    printed = capfd.readouterr()
    assert "Failed to" not in printed.out + printed.err  # MMEngine's own complaint
