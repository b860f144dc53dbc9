"""Kills conversions at random moments and looks at what is left. Run as a program: it forks, so it keeps torch out."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint import convert, diff, verify

SETTINGS: dict[str, dict[str, Any]] = {
    "out.pth": {"keep": "all"},
    "out.safetensors": {},
    "index": {"max_shard_size": "8MB"},
    "dcp": {"to": "dcp", "ranks": 3, "keep": "model"},
    "local": {"to": "local", "ranks": 3},
}


def main(directory: Path, name: str, kills: int, seed: int) -> None:
    """Kill so many conversions of ``new.pth``, half of them over what was made of ``old.pth``."""
    new, old = directory / "new.pth", directory / "old.pth"
    options: dict[str, Any] = {**SETTINGS[name], "jobs": 2, "overwrite": True}
    target, kept = directory / "targets" / name, directory / f"kept_{name}"
    target.parent.mkdir(exist_ok=True)
    before = new.read_bytes()
    convert(old, kept, fsync=False, **options)
    began = time.perf_counter()
    convert(new, target, **options)
    usual = time.perf_counter() - began
    draw = random.Random(seed)
    seen = {"killed": 0, "old": 0, "new": 0, "nothing": 0}
    for index in range(kills):
        clear(target.parent)
        over = index % 2 == 0
        if over:
            shutil.copytree(kept, target) if kept.is_dir() else shutil.copy(kept, target)
        # The end, where things are moved into place, is what matters most.
        moment = draw.choice([draw.uniform(0, 1.1), draw.uniform(0.8, 1.2)]) * usual
        seen["killed"] += killed(new, target, options, moment)
        seen[state(target, new, old, over)] += 1
    assert new.read_bytes() == before
    print(json.dumps(seen))


def clear(directory: Path) -> None:
    for entry in directory.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def forked(source: Path, target: Path, options: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            convert(source, target, **options)
        finally:
            os._exit(0)
    return child


def killed(source: Path, target: Path, options: dict[str, Any], moment: float) -> bool:
    child = forked(source, target, options)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def state(target: Path, new: Path, old: Path, over: bool) -> str:
    """Return what is at a target after a kill, and prove it whole; then convert again and look for leftovers."""
    found = "nothing"
    if target.exists():
        assert verify(target).ok
        found = "new" if diff(target, new).same else "old"
        assert found == "new" or diff(target, old).same
        assert found == "new" or over
    else:
        assert not over, "what is replaced is never missing"
    options = SETTINGS[target.name]
    convert(new, target, overwrite=True, fsync=False, **options)
    assert os.listdir(target.parent) == [target.name]
    assert diff(target, new).same
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
