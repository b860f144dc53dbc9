"""The command line on checkpoints of other tools: DCP directories and shards, without torch in the process."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.cli.support import golden, invoke, read_safetensors, run, write_safetensors


def test_a_distributed_checkpoint_of_torch(tmp_path: Path) -> None:
    directory = golden("dcp", tmp_path)
    found = json.loads(run("inspect", directory, "--json").stdout)
    assert (found["format"], found["num_tensors"], found["content"]["epoch"]) == ("dcp", 1, {"value": 3})
    done = run("convert", directory, tmp_path / "out.safetensors")
    assert done.returncode == 0, done.stderr
    assert read_safetensors(tmp_path / "out.safetensors") == {"w": ("F32", [2, 3], struct.pack("<6f", *range(6)))}
    assert run("verify", directory).returncode == 0
    assert run("diff", directory, tmp_path / "out.safetensors").returncode == 0
    (directory / "__0_0.distcp").unlink()
    result = invoke("convert", directory, tmp_path / "other.pth")
    assert result.exit_code == 1
    assert "__0_0.distcp, which holds 'epoch', is missing" in result.stderr


def test_resharding_a_distributed_checkpoint(tmp_path: Path) -> None:
    directory = golden("dcp", tmp_path)
    done = run("convert", directory, tmp_path / "two", "--to", "dcp", "--ranks", 2)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(run("inspect", tmp_path / "two", "--tensor", "w", "--json").stdout)["chunks"]) == 2
    assert run("diff", directory, tmp_path / "two").returncode == 0


def test_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"w": [1.0, 1.0]})
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 0
    assert "safetensors_index: 1 tensor, 8 B" in result.stdout
