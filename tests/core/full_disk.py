"""Lets the disk end in the middle of conversions, and looks at what is left. Run as a program: its limits are its own.

The limit on the size of files is a real one of the kernel's: what would write beyond it gets EFBIG, as it gets ENOSPC
from a full disk.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.core.crashing import SETTINGS

from mmfsdp.checkpoint import convert, diff
from mmfsdp.errors import CheckpointError


def main(directory: Path, name: str) -> None:
    """Convert ``new.pth`` in every way over what was made of ``old.pth``, and print the messages."""
    faulthandler.dump_traceback_later(100, exit=True)  # a hang shows where
    target = directory / "targets" / name
    target.parent.mkdir()
    before = (directory / "new.pth").read_bytes()
    convert(directory / "old.pth", target, fsync=False, **SETTINGS[name])
    messages = set()
    for jobs, dtype, at_end in itertools.product((1, 4), (None, "bf16"), (False, True)):
        try:
            convert(
                directory / "new.pth",
                target,
                jobs=jobs,
                dtype=dtype,
                progress=_limiting(1_100_000 if not at_end else 0, at_end),
                overwrite=True,
                **SETTINGS[name],
            )
            messages.add("no error")
        except CheckpointError as error:
            messages.add(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (_NONE, _NONE))
        assert os.listdir(target.parent) == [name]
        assert threading.active_count() == 1
    assert diff(target, directory / "old.pth").same
    assert (directory / "new.pth").read_bytes() == before
    print(json.dumps(sorted(messages)))


_NONE = resource.RLIM_INFINITY


def _limiting(size: int, at_end: bool) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if not at_end or done == total:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, _NONE))

    return progress


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
