"""Every command refuses a pickle whose names hold opcodes, and runs and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.core.planted_names import with_planted_name


def run(*args: object) -> subprocess.CompletedProcess[str]:
    code = "from mmfsdp_cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.mark.sample(
    "convert {source} {target}/out.pth --keep all --trust",
    "verify {source}",
    "inspect {source}",
    "diff {source} {other}",
)
@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "{source}"],
        ["inspect", "{source}", "--trust"],
        ["verify", "{source}"],
        ["verify", "{source}", "--trust"],
        ["convert", "{source}", "{target}/out.pth", "--keep", "all"],
        ["convert", "{source}", "{target}/out.pth", "--keep", "all", "--trust"],
        ["convert", "{source}", "{target}/out", "--to", "local", "--ranks", "2", "--trust"],
        ["convert", "{source}", "{target}/out", "--to", "dcp", "--trust"],
        ["convert", "{source}", "{target}/out.safetensors"],
        ["diff", "{source}", "{other}"],
        ["diff", "{other}", "{source}"],
    ],
    ids=" ".join,
)
def test_every_command_names_a_planted_opcode(tmp_path: Path, command: list[str]) -> None:
    marker = tmp_path / "marker"
    source = with_planted_name(tmp_path / "in.pth", marker)
    torch.save({"model": {"w": torch.zeros(4)}}, tmp_path / "other.pth")
    (tmp_path / "out").mkdir()
    places = {"source": str(source), "target": str(tmp_path / "out"), "other": str(tmp_path / "other.pth")}
    done = run(*[part.format(**places) for part in command])
    for output in (tmp_path / "out").rglob("*.pth"):
        torch.load(output, weights_only=False)
    assert not marker.exists()
    assert done.returncode != 0, done.stdout
    assert "in.pth" in done.stderr
    assert "cposix" in done.stderr, done.stderr
    assert "is not a name" in done.stderr
    assert [*(tmp_path / "out").iterdir()] == []
