"""``mmfsdp-cli inspect`` and ``convert`` as users run them: output, messages and exit codes."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mmfsdp_cli import __version__
from mmfsdp_cli.main import app

runner = CliRunner()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tree = {
        "state_dict": {"backbone.conv": torch.ones(2, 3), "head": torch.zeros(4, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]},
        "meta": {"epoch": 3},
    }
    torch.save(tree, tmp_path / "epoch_3.pth")
    return tmp_path / "epoch_3.pth"


def run(*args: object) -> subprocess.CompletedProcess[str]:
    code = "from mmfsdp_cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    names = ["a\x1b[2Jb", "two\nlines", "x" * 5000, "größe"]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "in.pth")
    for args in (["inspect"], ["inspect", "--tree"], ["inspect", "--tensor", names[0]]):
        result = runner.invoke(app, [args[0], str(tmp_path / "in.pth"), *args[1:]])
        assert result.exit_code == 0
        assert "a\\x1b[2Jb" in result.output
        assert "\x1b" not in result.output
        assert "\nlines" not in result.output
        assert max(map(len, result.output.splitlines())) < 300
    assert "größe" in runner.invoke(app, ["inspect", str(tmp_path / "in.pth")]).output
    torch.save({names[0]: torch.zeros(2)}, tmp_path / "other.pth")
    result = runner.invoke(app, ["diff", str(tmp_path / "in.pth"), str(tmp_path / "other.pth")])
    assert result.exit_code == 1
    assert "\x1b" not in result.output
    torch.save({names[0]: torch.full((2,), 1e30)}, tmp_path / "large.pth")
    done = run("convert", tmp_path / "large.pth", tmp_path / "out.pth", "--dtype", "float16")
    assert "warning: 2 elements of" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    described = json.loads(runner.invoke(app, ["inspect", str(tmp_path / "in.pth"), "--json"]).output)
    assert [entry["name"] for entry in described["tensors"]] == names


def test_inspect(checkpoint: Path) -> None:
    result = runner.invoke(app, ["inspect", str(checkpoint)])
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "tensor dtype shape chunks bytes"
    assert "state_dict/backbone.conv float32 2 × 3 1 24 B" in lines
    assert "torch_zip: 3 tensors, 56 B" in lines
    assert "meta: 1 value: epoch" in lines
    assert "optimizer: 1 tensor, 24 bytes" in lines

    limited = runner.invoke(app, ["inspect", str(checkpoint), "--limit", "1"]).stdout
    assert "... and 2 more (--limit 0 shows all)" in limited
    assert "head" not in limited


def test_inspect_json(checkpoint: Path) -> None:
    found = json.loads(runner.invoke(app, ["inspect", str(checkpoint), "--json"]).stdout)
    assert (found["format"], found["world_size"], found["num_tensors"], found["total_bytes"]) == ("torch_zip", 1, 3, 56)
    head = {"name": "state_dict/head", "dtype": "bfloat16", "shape": [4], "chunks": 1, "bytes": 8}
    assert found["tensors"][1] == head


def test_convert(checkpoint: Path) -> None:
    target = checkpoint.with_name("out.safetensors")
    result = runner.invoke(app, ["convert", str(checkpoint), str(target)])
    assert result.exit_code == 0, result.output
    assert f"Wrote {target} (safetensors): 2 tensors, 32 B in " in result.stdout
    assert "Not written: optimizer, meta." in result.stdout
    assert torch.equal(load_file(target)["backbone.conv"], torch.ones(2, 3))

    result = runner.invoke(app, ["convert", str(checkpoint), str(target)])
    assert result.exit_code == 2
    assert "exists already. Pass overwrite=True (--force)" in result.stderr
    result = runner.invoke(app, ["convert", str(checkpoint), str(target), "--force", "--keep", "all", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["tensors"], report["dropped"]) == (3, ["optimizer/param_groups", "meta"])


def test_convert_to_says_the_format(checkpoint: Path) -> None:
    target = checkpoint.with_name("weights.bin")
    options = ["--to", "pth", "--no-verify", "--keep", "meta"]
    result = runner.invoke(app, ["convert", str(checkpoint), str(target), *options])
    assert result.exit_code == 0, result.output
    assert torch.load(target, weights_only=True) == {"meta": {"epoch": 3}}
    result = runner.invoke(app, ["convert", str(checkpoint), str(target.with_name("x.bin"))])
    assert result.exit_code == 2
    assert "does not name a format" in result.stderr


def test_a_wrong_path_is_one_line_without_traceback(checkpoint: Path) -> None:
    done = run("inspect", checkpoint.with_name("epoch3.pth"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: There is no checkpoint at ")
    assert "Did you mean 'epoch_3.pth'?" in done.stderr


def test_damage_and_danger_exit_with_1(checkpoint: Path) -> None:
    raw = bytearray(checkpoint.read_bytes())
    raw[raw.index(struct.pack("<6f", *[1.0] * 6))] ^= 1
    damaged = checkpoint.with_name("damaged.pth")
    damaged.write_bytes(raw)
    done = run("convert", damaged, checkpoint.with_name("out.pth"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: The data of tensor 'state_dict/backbone.conv' in damaged.pth is damaged: ")
    assert not checkpoint.with_name("out.pth").exists()

    torch.save({"state_dict": {}, "meta": shutil.rmtree}, damaged)
    assert run("inspect", damaged).returncode == 1
    assert "wants to import 'shutil.rmtree'" in run("inspect", damaged).stderr
    assert run("inspect", damaged, "--trust").returncode == 0


def test_usage(checkpoint: Path) -> None:
    assert run("inspect").returncode == 2
    assert run("--version").stdout == f"mmfsdp-cli {__version__}\n"
    done = run("--help")
    assert "inspect" in done.stdout
    assert "convert" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from mmfsdp_cli.main import app
try:
    app(["--help"])
except SystemExit:
    pass
print(sorted({'torch', 'pydantic', 'mmfsdp', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
