"""``mmfsdp-cli verify`` and ``diff``, ``formats`` and the larger conversions, as users run them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mmfsdp_cli.main import app

runner = CliRunner()


def run(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, which fails if torch has been imported."""
    code = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: 'torch' in sys.modules and os._exit(99))\n"
        "from mmfsdp_cli.main import main; main()"
    )
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tree = {
        "state_dict": {"backbone.conv": torch.arange(6.0).view(2, 3), "head": torch.zeros(4, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]},
        "meta": {"epoch": 3},
    }
    torch.save(tree, tmp_path / "epoch_3.pth")
    return tmp_path / "epoch_3.pth"


def damaged(path: Path) -> Path:
    raw = bytearray(path.read_bytes())
    raw[raw.index(struct.pack("<6f", *range(6))) + 3] ^= 1
    path.with_name("damaged.pth").write_bytes(raw)
    return path.with_name("damaged.pth")


def test_verify(checkpoint: Path) -> None:
    done = run("verify", checkpoint, "--jobs", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{checkpoint}: ok (torch_zip, 3 tensors, ")
    done = run("verify", damaged(checkpoint))
    assert done.returncode == 1
    assert done.stderr.startswith("error: The data of tensor 'state_dict/backbone.conv' in damaged.pth is damaged: ")
    assert "damaged.pth: 1 problem (torch_zip" in done.stdout
    assert run("verify", checkpoint.with_name("epoch_4.pth")).returncode == 2


def test_verify_json(checkpoint: Path) -> None:
    result = runner.invoke(app, ["verify", str(damaged(checkpoint)), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["ok"], report["format"], len(report["problems"])) == (False, "torch_zip", 1)
    assert report["problems"][0]["file"].endswith("damaged.pth")


def test_diff(checkpoint: Path) -> None:
    assert run("convert", checkpoint, checkpoint.with_name("out.safetensors")).returncode == 0
    done = run("diff", checkpoint, checkpoint.with_name("out.safetensors"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Not compared: a: optimizer, a: meta." in done.stdout
    assert "the same: 2 tensors compared (model) in " in done.stdout

    done = run("diff", checkpoint, damaged(checkpoint))
    assert done.returncode == 1
    assert "state_dict/backbone.conv: 1 of 6 elements differ, by up to " in done.stdout
    assert "different: 3 tensors compared (all) in " in done.stdout
    assert run("diff", checkpoint, damaged(checkpoint), "--atol", "10").returncode == 0
    report = json.loads(run("diff", checkpoint, damaged(checkpoint), "--json").stdout)
    assert report["values"][0]["differing"] == 1
    assert run("diff", checkpoint, "nowhere.pth").returncode == 2
    assert run("diff", checkpoint, checkpoint, "--keep", "optimiser").returncode == 2


def test_inspect_one_tensor(checkpoint: Path) -> None:
    done = run("inspect", checkpoint, "--tensor", "backbone.conv", "--stats")
    assert done.returncode == 0
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["max", "5"] in lines
    assert ["mean", "2.5"] in lines
    assert json.loads(run("inspect", checkpoint, "--tensor", "head", "--stats", "--json").stdout)["zeros"] == 4
    assert (
        "state_dict/head: bfloat16, 4, 8 B\n  [0] of size [4]: "
        in run("inspect", checkpoint, "--tensor", "head").stdout
    )
    assert run("inspect", checkpoint, "--tensor", "heat").returncode == 2
    assert run("inspect", checkpoint, "--stats").returncode == 2


def test_inspect_tree(checkpoint: Path) -> None:
    lines = [" ".join(line.split()) for line in run("inspect", checkpoint, "--tree").stdout.splitlines()]
    assert lines[:3] == ["state_dict/ 2 tensors 32 B", "backbone.conv float32 2 × 3 24 B", "head bfloat16 4 8 B"]
    tree = json.loads(run("inspect", checkpoint, "--tree", "--json").stdout)
    assert (tree["tensors"], tree["bytes"]) == (3, 56)


def test_convert_in_part(checkpoint: Path) -> None:
    target = checkpoint.with_name("out.pth")
    options = ["--include", "backbone.*", "--rename", r"^backbone\.=encoder.", "--dtype", "bf16", "--verify-output"]
    done = run("convert", checkpoint, target, *options)
    assert done.returncode == 0, done.stderr
    assert "1 tensors, 12 B in " in done.stdout
    assert ", verified." in done.stdout
    assert torch.load(target, weights_only=True)["state_dict"]["encoder.conv"].dtype == torch.bfloat16
    assert run("convert", checkpoint, target, "--force", "--rename", "x").returncode == 2
    assert run("convert", checkpoint, target, "--force", "--include", "neck.*").returncode == 2


def test_convert_dry_run_and_shards(checkpoint: Path) -> None:
    target = checkpoint.with_name("shards")
    done = run("convert", checkpoint, target, "--max-shard-size", "24B", "--dry-run")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"Would write {target} (safetensors_index): 2 tensors, 32 B."
    assert lines[1] == "  model-00001-of-00002.safetensors: 24 B"
    assert not target.exists()
    done = run("convert", checkpoint, target, "--max-shard-size", "24B", "--json", "--no-fsync")
    assert json.loads(done.stdout)["files"]["model-00002-of-00002.safetensors"] == 8
    assert run("diff", checkpoint, target).returncode == 0


def test_convert_publish(checkpoint: Path) -> None:
    report = json.loads(run("convert", checkpoint, checkpoint.with_name("m.pth"), "--publish", "--json").stdout)
    assert run("inspect", report["path"]).returncode == 0
    done = run("convert", checkpoint, checkpoint.with_name("n.pth"), "--dtype", "head=fp32", "--dtype", "re:.*=fp16")
    assert "Cast: 2 tensors." in done.stdout


def test_formats_are_those_that_are_read_and_written(checkpoint: Path) -> None:
    listed = {item["name"]: item for item in json.loads(run("formats", "--json").stdout)}
    assert all(item["reads"] and item["description"] for item in listed.values())
    assert {"dcp", "rank_local", "torch_legacy", "torch_index", "mmengine_local"} <= {*listed}
    written = {name for name, item in listed.items() if item["writes"]}
    assert written == {"safetensors", "torch_zip", "safetensors_index", "dcp", "rank_local"}
    for name in written:
        target = checkpoint.with_name(f"as_{name}")
        report = json.loads(
            run("convert", checkpoint, target, "--to", [name, *listed[name]["aliases"]][-1], "--json").stdout
        )
        assert report["format"] == name == json.loads(run("inspect", target, "--json").stdout)["format"]
    lines = run("formats").stdout.splitlines()
    assert lines[0].split() == ["format", "reads", "writes", "what", "it", "is"]
    assert len(lines) == len(listed) + 1
