"""docs/tutorials/mmpretrain.md: its commands print what it shows, and give weights that mmpretrain and timm load."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.console_blocks import plain
from tests.doc_pages import ROOT, blocks

PAGE = ROOT / "docs" / "tutorials" / "mmpretrain.md"

# torchvision's CUDA build does not load its operators beside torch's CPU build. Python runs this file at its start.
STAND_IN = """
import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

IN_TIMM = """
import timm
from safetensors.torch import load_file

timm.create_model("deit_small_patch16_224").load_state_dict(load_file("deit_timm.safetensors"))
"""


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


pytestmark = pytest.mark.skipif(installed("mmpretrain") is None, reason="`nox -s configs` has mmpretrain")


def test_what_the_tutorial_installs_is_what_its_commands_run_with() -> None:
    requirement = pytest.importorskip("packaging.requirements")
    text = "".join(block.text for block in blocks(PAGE) if block.language == "bash")
    words = [word for line in re.findall(r"^pip install (.*)$", text, re.MULTILINE) for word in shlex.split(line)]
    named = [requirement.Requirement(word) for word in words if word[0].isalpha() and not word.endswith(".txt")]
    assert [item.name for item in named] == ["mmpretrain", "mmcv-lite", "torchvision"]
    assert [item for item in named if not item.specifier.contains(installed(item.name) or "0")] == []
    assert all(installed(name) for name in ("mmfsdp", "mmfsdp-mmengine", "mmfsdp-cli", "mmengine"))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Variables with which commands find those of this environment, and a torchvision that can be imported."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "160"}
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        assert "operator torchvision::nms does not exist" in done.stderr
        (tmp_path / "sitecustomize.py").write_text(STAND_IN)
        env["PYTHONPATH"] = str(tmp_path)
    return env


@pytest.mark.timeout(1200)
def test_the_tutorial_of_mmpretrain(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "examples" / "mmpretrain"
    shutil.copytree(ROOT / "examples" / "mmpretrain", folder)
    text = re.sub(r"\\\n\s*", " ", "".join(block.text for block in blocks(PAGE) if block.runs))
    first, *shown = [part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE) if part]
    assert first[0] == "cd examples/mmpretrain"
    for command, _, expected in shown:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\nprints\n{done.stdout}"
        printed = iter(plain(done.stdout))
        missing = [line for line in plain(expected) if line != "..." and not any(line in other for other in printed)]
        assert missing == [], f"$ {command}\nprints\n{done.stdout}"

    exported = load_file(folder / "deit_small.safetensors")
    weights = torch.load(folder / "deit_small.pth")["state_dict"]
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    done = subprocess.run([sys.executable, "-c", IN_TIMM], cwd=folder, env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
