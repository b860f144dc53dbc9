"""Runs the commands of console blocks, and compares what they print with what the page shows."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

from tests.forked_scripts import environ_with_commands

__all__ = ["check", "plain", "walk"]

# What differs from run to run, or from machine to machine.
VARYING = [
    (r"(?m)^\d+ %  .+ of .+\n", ""),  # progress, which a slow machine has time to print
    (r"in [\d.]+ s\b", "in # s"),
    (r"\([\d.]+ \w+/s\)", "(#/s)"),
    (r"Free on the disk: .*", "Free on the disk: #"),
    (r"at byte \d+", "at byte #"),
    (r"[\d.]+ \w+ compared", "# compared"),
    (r"offset(=|: )\d+", r"offset\1#"),
    (r"(CRC-32|CRC-32 is|expected) [0-9a-f]{8}\b", r"\1 #"),
    (r"-?\d+\.\d{4,}(e-?\d+)?", "#"),
    (r"[ ]+", " "),
]
# The pages show what the pinned torch does: other releases keep what they gather for a longer or shorter time, so that
# bytes and seconds of a step differ, and with them what fits and is fastest.
_torch = re.search(r"^torch==(.*)$", (Path(__file__).parents[1] / "constraints.txt").read_text(), re.MULTILINE)
IS_PINNED = _torch is not None and version("torch").startswith(_torch[1])
if not IS_PINNED:
    VARYING += [
        (r"\d[\d.]* ([KMG]i?B)\b", r"# \1"),
        (r"\d[\d.]* (ms|us|s)\b", "# s"),
        (r"\d+%", "#%"),
    ]


def check(block: str) -> None:
    """Run a block in the current directory, as a reader would who types every command of a page in order.

    Raises:
        AssertionError: A command prints something else, or one without output on the page fails.
    """
    walk([block], Path.cwd())


def walk(texts: list[str], directory: Path) -> list[tuple[str, str]]:
    """Run blocks one after the other in a directory and return each command with what it printed.

    A line `$ cd FOLDER` holds for all commands after it. Where the command line is not installed, as in `nox -s
    core_alone`, its commands are left out.

    Raises:
        AssertionError: A command prints something else, or one without output on the page fails.
    """
    done = []
    for text in texts:
        joined = re.sub(r"\\\n\s*>?\s*", " ", text)
        for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            if command.startswith("cd "):
                directory = directory / command.removeprefix("cd ").strip()
                continue
            if command.startswith("mmfsdp-cli ") and importlib.util.find_spec("mmfsdp_cli") is None:
                continue
            printed, code = _run(command, directory)
            if expected.strip():
                assert plain(printed) == plain(expected), f"$ {command}\nprints\n{printed}\nand not\n{expected}"
            else:
                assert code == 0, f"$ {command}\nends with exit code {code}:\n{printed}"
            done.append((command, printed))
    return done


def _run(command: str, directory: Path) -> tuple[str, int]:
    """Return what a command prints, errors included, and its exit code."""
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1"}
    env = {**environ_with_commands(), **quiet, "COLUMNS": "160"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.decode(), done.returncode


def plain(text: str) -> list[str]:
    """Return the lines of an output without what varies, and without what gloo says of itself before torch 2.10."""
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    return [line.strip() for line in without_gloo(text.strip())]


def without_gloo(text: str) -> list[str]:
    """Return the lines of an output without gloo's: before torch 2.10 it prints how many peers it has, in parts.

    Processes print between the parts of each other. A line then has two messages, and the end of one of them is on the
    next line.
    """
    lines, unfinished = [], 0
    for line in text.splitlines():
        if "[Gloo]" in line or "peer ranks" in line:
            unfinished += line.count("peer ranks is : ") - 1 if "peer ranks is : " in line else 0
        elif unfinished and (line.strip().isdigit() or not line.strip()):
            unfinished -= 1
        else:
            lines.append(line)
    return lines
