"""MMEngine's runner with our strategy on a GPU has the losses of its own strategy for a single device."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mmengine") is None, reason="MMEngine is not installed")


@functools.cache
def logged(strategy: str, precision: str = "fp32") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.gpu.mmengine_run", folder, strategy, precision]
        root = Path(__file__).parents[2]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_losses(engine: str) -> None:
    assert logged(engine)["losses"] == pytest.approx(logged("unsharded")["losses"], rel=1e-4)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_amp(precision: str) -> None:
    found = logged("fsdp2", precision)["losses"]
    assert found == pytest.approx(logged("unsharded", precision)["losses"], rel=0.05)
