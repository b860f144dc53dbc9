"""The command line where MMEngine's configs can be read: `doctor`, and `plan` of a config."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.cli.support import fields_of
from tests.forked_scripts import python
from tests.mmengine_adapter.test_doctor import CONFIGS, diagnosis
from tests.mmengine_adapter.test_rehearsing import TEXT as STEP

import mmfsdp
from mmfsdp_cli.main import app


def invoke(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, words)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(("name", "code"), [("deit", 0), ("every argument wrong", 1)])
def test_doctor(tmp_path: Path, name: str, code: int) -> None:
    found = diagnosis(tmp_path, CONFIGS[name][0])
    exit_code, shown, _ = invoke("doctor", tmp_path / "config.py")
    assert exit_code == code
    for finding in found.findings:
        assert finding.path in shown
    for part in (found.plan, found.memory):
        assert part is None or str(part) in shown
    assert ("ShardPlan: " in shown) == (found.plan is not None) == (found.memory is not None)
    exit_code, shown, _ = invoke("doctor", tmp_path / "config.py", "--json")
    assert (exit_code, fields_of("doctor", shown)) == (code, json.loads(json.dumps(found.describe())))
    assert "shard units" not in invoke("doctor", tmp_path / "config.py", "--no-plan")[1]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert invoke("doctor", tmp_path / "nothing.py")[0] == 2
    (tmp_path / "config.py").write_text("model = dict(")
    code, shown, error = invoke("doctor", tmp_path / "config.py")
    assert (code, shown) == (2, "")
    assert error.startswith("error: config.py cannot be read: SyntaxError")
    (tmp_path / "config.py").write_text(CONFIGS["names that nothing has"][0])
    code, _, error = invoke("plan", tmp_path / "config.py")
    assert code == 2
    assert "Did you mean 'Transformer'?" in error
    assert "(config: model.type)" in error


def test_the_plan_of_a_config(tmp_path: Path) -> None:
    truth = diagnosis(tmp_path, CONFIGS["swin"][0], 16).plan
    config = tmp_path / "config.py"
    assert mmfsdp.ShardPlan.from_json(invoke("plan", config, "--ranks", 16, "--json")[1]) == truth
    memory = json.loads(invoke("plan", config, "--ranks", 16, "--json")[1])["memory"]
    assert memory == diagnosis(tmp_path, CONFIGS["swin"][0], 16).memory.describe()
    assert memory["optimizer_state"] > 0, "that of the config's optimizer"
    changed = mmfsdp.ShardPlan.from_json(invoke("plan", config, "--set", "wrap=none", "--json")[1])
    assert [unit.class_name for unit in changed.units] == ["BatchNorm1d", "Pyramid"]


@pytest.mark.exhaustive
def test_the_step_of_a_config_is_proven_against_ddp(tmp_path: Path) -> None:
    """Its data pipeline, preprocessor, batch norm, loss, optimizer, clipping and accumulation."""
    (tmp_path / "config.py").write_text(STEP)
    words = ("--batch-size", "own", "--against", "ddp", "--steps", 1, "--json")
    code, shown, error = invoke("prove", tmp_path / "config.py", *words)
    assert code == 0, (shown, error)
    found = json.loads(shown)
    assert (found["proven"], found["against"], found["model"]) == (True, "ddp", "Pictured")
    assert {difference for run in ("trained", "resumed") for difference in found[run]["differences"]} == set()


@pytest.mark.exhaustive
def test_all_samples_of_a_step_of_a_config_are_divided_anew(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(STEP)  # it has two micro-batches
    words = ("--batch-size", 2, "--memory", "60GiB", "--set", "precision=fp32", "--set", "sharding=NO_SHARD", "--json")
    code, shown, error = invoke("fit", tmp_path / "config.py", *words)
    assert code == 0, (shown, error)
    options = json.loads(shown)["options"]
    assert {(option["accumulate"], option["samples"]) for option in options} == {(1, 4), (2, 2), (4, 1)}
    found = [
        invoke("rehearse", tmp_path / "config.py", *size, "--json")
        for size in (words[:2], (*words[:2], "--accumulate", 1))
    ]
    counts = [
        [phase["name"] for phase in json.loads(shown)["rehearsal"]["phases"]].count("forward") for _, shown, _ in found
    ]
    assert counts == [2, 1]


def test_settings_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sharding: HYBRID_SHARD\nwrap: {kind: module_class, classes: Linear}\n")
    settings = {"sharding": "HYBRID_SHARD", "wrap": {"kind": "module_class", "classes": "Linear"}}
    (tmp_path / "a.json").write_text(json.dumps(settings))
    sizes = ("--model-arg", "in_features=4", "--model-arg", "out_features=4")
    words = ("plan", "torch.nn:Linear", *sizes, "--ranks", "2x2")
    one, two = (invoke(*words, "--config", tmp_path / name) for name in ("a.yaml", "a.json"))
    assert one == two
    assert one[0] == 0, one[2]
    (tmp_path / "a.yaml").write_text("sharding: [")
    assert invoke(*words, "--config", tmp_path / "a.yaml")[0] == 2


def test_what_models_print_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIGS["deit"][0].replace("'Transformer'", "'Noisy'"))
    code = "from mmfsdp_cli.main import main; main()"
    for command in ("doctor", "plan"):
        words = [python(), "-c", code, command, tmp_path / "config.py", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        assert json.loads(done.stdout)
        assert done.stderr.count("built") == 2
        assert "paramwise_options" not in done.stderr
