"""Runs scripts in processes that have imported torch already: importing it anew takes longer than most scripts."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mmfsdp.testing import close_ranks, run_ranks

__all__ = ["run_script"]


def run_script(
    script: Path, directory: Path, environ: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python SCRIPT` would, and return how it ended and what it and its children printed.

    Args:
        script: The script.
        directory: The current directory.
        environ: The whole environment. Of ``PYTHONPATH``, what the process does not have is put first.
        seconds: How long it may take.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    run_ranks(_ready, 1)  # starts the process that all are forked from, with what tests have it import
    files = [script.with_suffix(suffix) for suffix in (".out", ".err")]
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_main, args=(script, directory, dict(environ), files))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired([str(script)], seconds, *(file.read_bytes() for file in files))
    said, errors = (file.read_text(encoding="utf-8") for file in files)
    return subprocess.CompletedProcess([str(script)], process.exitcode, said, errors)


def _ready(rank: int) -> None:
    """Do nothing."""


def _main(script: Path, directory: Path, environ: dict[str, str], files: list[Path]) -> None:
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    added = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ["", *sys.path]]
    sys.path[:0] = [str(script.parent), *added]
    sys.argv = [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        close_ranks()
        sys.stdout.flush()
        sys.stderr.flush()
