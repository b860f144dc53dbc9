"""Ctrl-C or SIGTERM during a conversion ends it at once, and leaves nothing half."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def _heed_interrupts() -> None:
    # Shells let what they start in the background, these tests for instance, ignore them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "Interrupted; nothing was written."), (signal.SIGTERM, 143, "")],
)
def test_interrupted(tmp_path: Path, number: signal.Signals, code: int, message: str) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 28], "data_offsets": [0, 1 << 30]}}).encode()
    with (tmp_path / "in.safetensors").open("wb") as file:  # almost all of it a hole
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 30))
    target = tmp_path / "out" / "out.pth"
    target.parent.mkdir()
    program = [Path(sys.executable).with_name("mmfsdp-cli"), "convert", tmp_path / "in.safetensors", target]
    process = subprocess.Popen(
        [*map(str, program), "--jobs", "2"], stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    )
    while not os.listdir(target.parent) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    began = time.perf_counter()
    _, errors = process.communicate(timeout=20)
    assert time.perf_counter() - began < 10
    assert process.returncode == code, errors
    assert message in errors
    assert "Traceback" not in errors
    assert os.listdir(target.parent) == []


@pytest.mark.sample("False")
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_conversion_that_keeps_its_parts_goes_on(tmp_path: Path, as_json: bool) -> None:
    size = 1 << 28
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "in.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    program = [Path(sys.executable).with_name("mmfsdp-cli"), "convert", "in.safetensors", "out.pth", "--continue"]
    words = [*map(str, program), "--jobs", "1", *(["--json"] if as_json else [])]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,
    )
    while len(os.listdir(tmp_path)) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "run the same command again, with --continue" in errors
    assert "nothing was written" not in errors
    if as_json:
        assert json.loads(output)["error"]["type"] == "KeyboardInterrupt"
    else:
        assert output == ""
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "out.pth"]


def test_no_stderr(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "in.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    program = f"{Path(sys.executable).with_name('mmfsdp-cli')} convert in.safetensors out.pth --no-fsync 2>&-"
    done = subprocess.run(["sh", "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["Wrote", "out.pth"])
