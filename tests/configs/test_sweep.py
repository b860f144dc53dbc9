"""doctor and plan on configs as OpenMMLab's packages bring them: none fails, and advice leaves little in the root."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.configs.sweep import MOST_IN_ROOT, configs_of, examine

from mmfsdp.frontends import read_config
from mmfsdp_cli.main import app

CONFIGS = Path(__file__).parent / "zoo/configs"
VGG = "model = dict(type='Classifier', backbone=dict(type='Vgg'))"
IMPORT = "custom_imports = dict(imports=['mmfsdp_mmengine'])"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))


@pytest.fixture(autouse=True)
def _zoo_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_all_configs_are_found() -> None:
    assert sorted(path.stem for path in configs_of("zoo")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_nothing_fails(name: str) -> None:
    outcome = examine(CONFIGS / f"{name}.py")
    assert (outcome.kind, outcome.cause) == ("skipped" if name == "dataset" else "good", "")
    assert outcome.share is None or outcome.share <= MOST_IN_ROOT


@pytest.mark.parametrize("name", ["lora", "fused", "asks_ranks"])
def test_constructors_that_need_values_give_models_without_memory(name: str) -> None:
    model = read_config(CONFIGS / f"{name}.py").model()
    assert all(param.is_meta for param in model.parameters())
    assert {param.requires_grad for param in model.parameters()} == ({False, True} if name == "lora" else {True})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("vit", "auto_wrap_policy='auto'"),
        ("swin", "auto_wrap_policy='auto'"),
        ("detr", "auto_wrap_policy='auto'"),
        ("resnet", "dict(kind='any_of', policies=['auto', dict(kind='module_name', patterns=['head.0'])])"),
        (
            "vgg",
            "patterns=['backbone.features.2', 'backbone.classifier.0', 'backbone.classifier.2'])",
        ),
    ],
)
def test_advice(name: str, advice: str) -> None:
    assert advice in examine(CONFIGS / f"{name}.py").advice


def test_what_is_advised_can_be_pasted(tmp_path: Path) -> None:
    for name in ("resnet", "vgg", "swin", "python_style"):
        diagnosis = read_config(CONFIGS / f"{name}.py").diagnose(None)
        [finding] = [item for item in diagnosis.findings if item.path == "strategy"]
        text = (CONFIGS / f"{name}.py").read_text().replace("_base_/", f"{CONFIGS}/_base_/")
        lines = finding.advice.splitlines()
        if name == "python_style":
            text = text.replace(
                "with read_base():\n    from ._base_.python_runtime import *\n", "default_scope = 'zoo'"
            )
        (tmp_path / "config.py").write_text("\n".join([*lines, text]))
        after = read_config(tmp_path / "config.py").diagnose(None)
        assert [item for item in after.findings if item.level == "error"] == []
        assert not after.suggested
        assert after.plan == diagnosis.plan


@pytest.mark.parametrize(
    ("text", "kind", "cause"),
    [
        ("model = dict(", "refused", "SyntaxError"),
        ("model = dict(type='Clasifier')", "refused", "Did you mean 'Classifier'"),
        (f"{VGG}\ncustom_imports = dict(imports=['nothing'])", "refused", "Failed to import custom modules"),
        (f"{VGG}\ncustom_hooks = [dict(type='Nothing')]", "false error", "custom_hooks[0].type: Nothing is not in"),
        (f"{VGG}\n{IMPORT}\nstrategy = dict(type='FSDPStrategy')", "weak advice", "100% in the root"),
        (
            f"{VGG}\nstrategy = dict(type='FSDPStrategy', model_wrapper=dict(auto_wrap_policy='size'))",
            "weak advice",
            "",
        ),
    ],
)
def test_the_sweep_finds_failures(tmp_path: Path, text: str, kind: str, cause: str) -> None:
    (tmp_path / "config.py").write_text(f"_base_ = ['{CONFIGS}/_base_/runtime.py']\n{text}")
    outcome = examine(tmp_path / "config.py")
    assert (outcome.kind, cause in outcome.cause) == (kind, True), outcome


def test_plan_says_that_nothing_is_sharded() -> None:
    shown = CliRunner().invoke(app, ["plan", str(CONFIGS / "swin.py")]).stdout
    assert "shards nothing. With the advice of 'mmfsdp-cli doctor'" in shown
    assert "stages.0.blocks" in shown
