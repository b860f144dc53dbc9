"""A save that fails in the background is logged, and a process that never asks for its result exits with a code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked_scripts import environ_alone, python

SCRIPT = Path(__file__).parents[1].joinpath("failing_save.py")
LOGGED, UNASKED = "The background save to", "Nobody called result()"


def run(*arguments: str, launcher: tuple[str, ...] = (), executable: str | None = None) -> tuple[int, str]:
    command = [executable or python(), *launcher, str(SCRIPT), *arguments]
    ended = subprocess.run(command, env=environ_alone(), capture_output=True, text=True, check=False, timeout=240)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("mode", "code", "logged", "unasked"),
    [("fails", 120, 1, 1), ("asked", 0, 1, 0), ("works", 0, 0, 0), ("raises", 1, 1, 0)],
)
def test_the_exit_code_shows_a_failure(mode: str, code: int, logged: int, unasked: int, tmp_path: Path) -> None:
    ended, text = run("alone", mode, str(tmp_path / "target"))
    assert (ended, text.count(LOGGED), text.count(UNASKED)) == (code, logged, unasked), text
    assert text.count("another handler") == 1
    assert ("the disk is full" in text) == bool(logged)
    assert (str(tmp_path / "target") in text) == bool(logged)
    assert (tmp_path / "target").exists() == (mode == "works")


@pytest.mark.exhaustive
def test_a_real_python_shows_the_failure(tmp_path: Path) -> None:
    """Others are forked by tests, and end as it does."""
    ended, text = run("alone", "fails", str(tmp_path / "target"), executable=sys.executable)
    assert (ended, text.count(UNASKED)) == (120, 1), text


@pytest.mark.exhaustive
def test_torchrun_sees_the_failure(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended, text = run("alone", "fails", str(tmp_path / "target"), launcher=torchrun)
    assert ended == 1, text
    assert "exitcode: 120" in text
    assert LOGGED in text


@pytest.mark.exhaustive
def test_a_spawned_rank_shows_the_failure(tmp_path: Path) -> None:
    ended, text = run("spawn", "fails", str(tmp_path / "target"))
    assert ended == 1, text
    assert "terminated with exit code 120" in text
    assert LOGGED in text
