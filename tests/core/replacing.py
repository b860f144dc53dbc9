"""Kills a conversion before each file operation of its last step. Run as a program: it forks, so it keeps torch out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.checkpoint.conversion import targets
from mmfsdp.checkpoint.files import disk
from mmfsdp.checkpoint.files.siblings import ABANDONED, interrupted

EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.link", "ctypes.dlsym", "open", "os.listdir", "shutil.rmtree"}


def main(directory: Path, name: str, over: bool, refused: bool) -> None:
    """Convert ``new.pth``, over what was made of ``old.pth`` or not, and die at each operation in turn."""
    new, old, target = directory / "new.pth", directory / "old.pth", directory / "targets" / name
    options: dict[str, Any] = {"fsync": False, "jobs": 1, "to": None if "." in name else "local", "ranks": None}
    options["ranks"] = 2 if options["to"] else None
    seen = {"old": 0, "new": 0, "nothing": 0, "beside": 0, "steps": 0}
    for step in range(200):
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        if over:
            convert(old, target, **options)
        if not killed(new, target, {**options, "overwrite": over}, step, refused):
            break
        seen["steps"] += 1
        for somewhere in (True, False):
            seen[looked_at(target, new, old, over, refused, options, somewhere)] += 1
    print(json.dumps(seen))


def killed(source: Path, target: Path, options: dict[str, Any], step: int, refused: bool) -> bool:
    child = os.fork()
    if child == 0:
        commit = targets.commit
        count = 0

        def hook(event: str, _: Any) -> None:
            nonlocal count
            if event in EVENTS:
                count += 1
                if count > step:
                    os.kill(os.getpid(), signal.SIGKILL)

        def watched(*arguments: Any, **more: Any) -> None:
            sys.addaudithook(hook)
            commit(*arguments, **more)

        targets.commit = watched  # type: ignore[attr-defined]
        if refused:
            disk._renameat2 = lambda *_: False  # as on a file system without it
        convert(source, target, **options)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def looked_at(
    target: Path, new: Path, old: Path, over: bool, refused: bool, options: dict[str, Any], somewhere: bool
) -> str:
    """Look at what a kill left, here or as another machine sees it; prove it whole, and that nothing of it stays."""
    kept = target.parent.with_name("kept")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(target.parent, kept, symlinks=True)
    if somewhere:
        for lease in target.parent.glob(".*.mmfsdp-lease"):
            text = json.loads(lease.read_text())
            lease.write_text(json.dumps({**text, "machine": "another/1", "host": "another"}))
    found = "nothing"
    beside = interrupted(target)
    if target.exists() or beside is not None:
        assert verify(open_layout(target)).ok
        found = "new" if diff(target, new).same else "old"
        assert found == "new" or diff(target, old).same
        assert found == "new" or over
        if beside is not None:
            assert refused
            found = "beside"
    assert over == (found != "nothing") or found == "new"
    if somewhere:
        left = {entry.name for entry in target.parent.iterdir() if "mmfsdp-partial" in entry.name}
        convert(new, target, **{**options, "overwrite": True})
        assert left <= set(os.listdir(target.parent)), "what another machine may be writing stays"
        aged(target.parent)
    convert(new, target, **{**options, "overwrite": True})
    assert os.listdir(target.parent) == [target.name], os.listdir(target.parent)
    assert diff(target, new).same
    shutil.rmtree(target.parent)
    kept.rename(target.parent)
    return found


def aged(directory: Path) -> None:
    then = time.time() - ABANDONED - 60
    for top, directories, files in os.walk(directory):
        for name in (*directories, *files, "."):
            os.utime(os.path.join(top, name), (then, then))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "over", sys.argv[4] == "refused")
