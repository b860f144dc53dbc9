"""Runs the commands of a console block of the documentation, and compares what they print with what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["check"]

# What differs from run to run, or from machine to machine.
VARYING = [
    (r"in [\d.]+ s\b", "in # s"),
    (r"\([\d.]+ \w+/s\)", "(#/s)"),
    (r"Free on the disk: .*", "Free on the disk: #"),
    (r"at byte \d+", "at byte #"),
    (r"CRC-32 [0-9a-f]{8}", "CRC-32 #"),
    (r"-?\d+\.\d{4,}(e-?\d+)?", "#"),
    (r"[ ]+", " "),
]


def check(block: str) -> None:
    """Run a block in a copy of the current directory, so that nothing of it is left.

    Raises:
        AssertionError: A command prints something else.
    """
    text = re.sub(r"\\\n\s*>?\s*", " ", block)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "cwd")
        shutil.copytree(Path.cwd(), directory, symlinks=True)
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            printed = run(command, directory)
            if expected.strip():
                assert plain(printed) == plain(expected), f"$ {command}\nprints\n{printed}\nand not\n{expected}"


def run(command: str, directory: Path) -> str:
    """Return what a command prints, errors included."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "160"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.decode()


def plain(text: str) -> list[str]:
    """Return the lines of an output without what varies."""
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    return [line.strip() for line in text.strip().splitlines()]
