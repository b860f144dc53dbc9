"""Reads the stack of a thread that goes on running, and tells whether it does what may take long."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import traceback
from collections.abc import Iterable
from typing import IO

__all__ = ["stack_of", "takes_long"]

_SLOW = tuple(os.path.join("torch", part, "") for part in ("_dynamo", "_inductor", "_functorch"))
_SLOW += (os.path.join("mmfsdp", "saving", ""), os.path.join("torch", "distributed", "checkpoint", ""))
# Of these, what is around any forward of a compiled unit and of torch.utils.checkpoint, long after all is compiled.
_RUNS = [
    "_dynamo/eval_frame",
    "_dynamo/external_utils",
    "_functorch/aot_autograd",
    "_functorch/_aot_autograd/runtime_wrappers",
    "_functorch/_aot_autograd/utils",
    "_inductor/output_code",
    "_inductor/utils",
]
_RUNNING = tuple(os.path.join("torch", *part.split("/")) + ".py" for part in _RUNS)


def stack_of(thread: int) -> traceback.StackSummary | None:
    """Return the last 100 calls of a thread, or None if they cannot be read: a process has more than 100 threads.

    Its frames cannot be walked from Python: between two steps the thread runs, and frees what the next step reads.

    Args:
        thread: What `threading.get_ident` returns in it.
    """
    try:
        with _file() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            dump = file.read().decode("ascii", "replace")
    except OSError:  # no file can be opened
        return None
    found = re.search(rf"hread 0x0*{thread:x}\b(.*?)(?:\n\n|\Z)", dump, flags=re.DOTALL)
    if found is None:
        return None
    calls = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', found[1], flags=re.MULTILINE)
    lasting = [(file, int(line), name, None) for file, line, name in reversed(calls)]
    return traceback.StackSummary.from_list(lasting)


def takes_long(stack: Iterable[traceback.FrameSummary]) -> bool:
    """Return whether a call on the stack compiles, saves or loads."""
    return any(any(part in call.filename for part in _SLOW) and not call.filename.endswith(_RUNNING) for call in stack)


def _file() -> IO[bytes]:
    """Open a file in memory, where the system has these: a disk may be full, or busy."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()
