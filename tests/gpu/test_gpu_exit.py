"""A process that trained on a GPU exits with status 0 and prints no traceback or warning of its process group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("ending", ["tidy", "abrupt"])
def test_exit(tmp_path: Path, ending: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "tests.gpu.exiting", str(tmp_path / "saved"), ending]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "terminate called" not in result.stderr
    assert (tmp_path / "saved" / "manifest.json").exists()
    if ending == "tidy":
        assert "destroy_process_group" not in result.stderr
