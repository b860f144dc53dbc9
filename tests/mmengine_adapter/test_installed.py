"""Importing the adapter says what to install where MMEngine is missing, too old, or there twice."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mmfsdp_mmengine
from mmfsdp.basics import pip_install
from mmfsdp_mmengine.installed import DISTRIBUTIONS, problem_of

PROJECT = Path(__file__).parents[2] / "packages/mmengine_adapter/pyproject.toml"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_distribution_alone_is_fine(name: str) -> None:
    assert problem_of({name: "0.10.7"}) is None
    assert problem_of({name: "1.0"}) is None
    found = problem_of({name: "0.9.1"})
    assert found == (
        f"mmfsdp_mmengine needs MMEngine 0.10 or newer, but {name} 0.9.1 is installed: pip install -U {name}"
    )


def test_none_and_two() -> None:
    lines = " or ".join(pip_install(f"mmfsdp-mmengine[{extra}]") for extra in ("mmengine", "lite", "onedl"))
    assert str(problem_of({})).endswith(f"Install one of its distributions: {lines}.")
    assert problem_of({"mmengine": "0.10.7", "mmengine-lite": "0.10.7"}) is None, "the same files"
    assert str(problem_of({"mmengine": "0.10.7", "onedl-mmengine": "0.10.12"})).endswith(
        "Keep one: pip uninstall -y mmengine onedl-mmengine && pip install onedl-mmengine"
    )


def test_each_distribution_has_its_extra() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = {name: items[0].partition(">")[0] for name, items in project["optional-dependencies"].items()}
    assert extras == {extra: name for name, extra in DISTRIBUTIONS.items()}
    assert not any("mmengine" in item for item in project["dependencies"])


def test_the_import_fails_before_anything_else(tmp_path: Path) -> None:
    for name in DISTRIBUTIONS:  # one of them is installed
        info = tmp_path / f"{name.replace('-', '_')}-0.9.{len(name)}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.{len(name)}\n")
    code = "import sys, mmfsdp_mmengine.installed"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "mmfsdp_mmengine.installed.MissingMMEngineError: mmengine 0.9.8 and mmengine-lite 0.9.13 and"
    )
    assert "are installed over each other" in last
    assert issubclass(mmfsdp_mmengine.MissingMMEngineError, ImportError)
