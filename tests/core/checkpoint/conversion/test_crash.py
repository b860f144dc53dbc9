"""A conversion that is killed, interrupted or out of disk leaves the source, the old target, and nothing else.

``MMFSDP_KILLS=50`` kills each kind of conversion so often instead of the few times of a normal run.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.crashing import SETTINGS

from mmfsdp.checkpoint import convert, diff
from mmfsdp.errors import CheckpointError

KILLS = int(os.environ.get("MMFSDP_KILLS", "6"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("old.pth", "new.pth")):
        torch.manual_seed(seed)
        weights = {f"layer.{i}.weight": torch.randn(512, 512) for i in range(12)}
        state = {0: {"exp_avg": torch.randn(512, 512)}}
        group = {"lr": 0.1, "params": [0], "param_names": ["layer.0.weight"]}
        optimizer = {"state": state, "param_groups": [group]}
        torch.save({"state_dict": weights, "optimizer": optimizer, "meta": {"epoch": seed}}, directory / name)
    return directory


@pytest.mark.sample("out.pth")
@pytest.mark.parametrize("name", [*SETTINGS])
def test_killed_at_random_moments(sources: Path, name: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30) if "MMFSDP_KILLS" in os.environ else 1
    script = Path(__file__).parents[2].joinpath("crashing.py")
    arguments = [sys.executable, str(script), str(sources), name, str(KILLS), str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=170 + KILLS * 5, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["killed"] > 0, seen
    assert sum(seen[key] for key in ("old", "new", "nothing")) == KILLS


@pytest.mark.parametrize("name", [*SETTINGS])
def test_no_room(sources: Path, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = SETTINGS[name]
    target = tmp_path / name
    convert(sources / "old.pth", target, fsync=False, **options)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, hard))
    try:
        with pytest.raises(CheckpointError, match=rf"{name} cannot be written: File too large"):
            convert(sources / "new.pth", target, overwrite=True, jobs=2, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handled)
    assert os.listdir(tmp_path) == [name]
    assert diff(target, sources / "old.pth").same


@pytest.mark.sample("out.pth", "index")
@pytest.mark.parametrize("name", [*SETTINGS])
def test_disk_full_in_the_middle(sources: Path, tmp_path: Path, name: str) -> None:
    for source in sources.glob("*.pth"):
        (tmp_path / source.name).hardlink_to(source)
    arguments = [sys.executable, "-m", "tests.core.full_disk", str(tmp_path), name]
    root = Path(__file__).parents[4]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    [message] = json.loads(done.stdout)
    assert message.startswith(f"{name} cannot be written: File too large. ")
    assert "ulimit -f" in message
    assert message.endswith(f"[file={str(tmp_path / 'targets' / name)!r}]")
