"""The command line on checkpoints of other tools: DCP directories and shards, without torch in the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mmfsdp_cli.main import app

runner = CliRunner()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    content = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint(directory: Path) -> None:
    found = json.loads(runner.invoke(app, ["inspect", str(directory), "--json"]).stdout)
    assert (found["format"], found["num_tensors"], found["content"]["epoch"]) == ("dcp", 1, "3")
    target = directory.parent / "out.safetensors"
    code = "import sys; from mmfsdp_cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    words = [sys.executable, "-c", code, "convert", str(directory), str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(target)["w"], torch.arange(6.0).reshape(2, 3))
    (directory / "__0_0.distcp").unlink()
    result = runner.invoke(app, ["convert", str(directory), str(directory.parent / "other.pth")])
    assert result.exit_code == 1
    assert "__0_0.distcp, which holds 'epoch', is missing" in result.stderr


def test_an_index(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    result = runner.invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0
    assert "safetensors_index: 1 tensors, 8 B" in result.stdout
