"""Runs scripts in processes that have imported torch already: importing it anew takes longer than most scripts."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmfsdp.testing import close_ranks, run_ranks

__all__ = ["environ_alone", "run_script"]


def run_script(
    script: Path, directory: Path, environ: Mapping[str, str], seconds: float, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python SCRIPT` would, and return how it ended and what it and its children printed.

    Args:
        script: The script.
        directory: The current directory.
        environ: The whole environment. Of ``PYTHONPATH``, what the process does not have is put first.
        seconds: How long it may take.
        arguments: What follows its name on the command line.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    run_ranks(_ready, 1)  # starts the process that all are forked from, with what tests have it import
    command = [str(script), *arguments]
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        process = context.Process(target=_main, args=(command, directory, dict(environ), files))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, seconds, *(file.read_bytes() for file in files))
        said, errors = (file.read_text(encoding="utf-8") for file in files)
    return subprocess.CompletedProcess(command, process.exitcode, said, errors)


def environ_alone() -> dict[str, str]:
    """Return the environment that torchrun gives to the only rank of a world."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **alone, "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def _ready(rank: int) -> None:
    """Do nothing."""


def _main(command: list[str], directory: Path, environ: dict[str, str], files: list[Path]) -> None:
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    added = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ["", *sys.path]]
    sys.path[:0] = [str(Path(command[0]).parent), *added]
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        close_ranks()
        sys.stdout.flush()
        sys.stderr.flush()
