"""Screens on a real terminal: no line is wider, no title is broken, colours unless they are forbidden."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tests.cli.support import ALONE, damaged, golden, write_safetensors

ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
LONG = "model.layers.{}.self_attention.query_key_value.weight"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    damaged(golden("epoch_3.pth", tmp_path))
    names = [LONG.format(layer) for layer in range(60)]
    write_safetensors(tmp_path / "a.safetensors", {name: [1.0, 2.0] for name in names})
    write_safetensors(tmp_path / "b.safetensors", {name: [1.0] for name in names[:3]}, "F64")
    return tmp_path


def on_terminal(columns: int, *words: str, **variables: str) -> str:
    """Return what a command prints on a terminal of so many columns, stdout and stderr together."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    env |= {"TERM": "xterm", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() in (0, 1, 2)
    return shown.decode().replace("\r\n", "\n")


SCREENS = {
    "help": (["--help"], ["Commands", "completion"]),
    "help of convert": (["convert", "--help"], ["--max-shard-size", "Arguments"]),
    "inspect": (["inspect", "a.safetensors"], ["tensor", "shape", "bytes", "--limit 0 shows all"]),
    "tree": (["inspect", "a.safetensors", "--tree", "--depth", "0"], ["name", "holds", "bytes"]),
    "one tensor": (["inspect", "epoch_3.pth", "--tensor", "head"], ["Chunks"]),
    "formats": (["formats"], ["format", "reads", "writes", "what it is"]),
    "dry run": (["convert", "a.safetensors", "x", "--max-shard-size", "99B", "--dry-run"], ["Files", "max_shard_size"]),
    "diff": (["diff", "a.safetensors", "b.safetensors"], ["Only in", "--ignore-dtypes"]),
    "verify": (["verify", "damaged.pth"], ["error: ", "1 problem"]),
    "error": (["inspect", "nothing.pth"], ["error: There is no checkpoint"]),
    "usage": (
        ["inspect", "a", *"bcdefghijklmnopqrstuvwxyz" * 3],
        ["error: Got unexpected", "Usage: mmfsdp-cli inspect"],
    ),
}


@pytest.mark.sample(
    "dry run-80",
    "formats-80",
    "tree-80",
    "diff-80",
    "inspect-80",
    "help of convert-80",
    "verify-80",
    "one tensor-80",
    "error-80",
    "usage-120",
)
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("screen", SCREENS)
def test_it_fits_and_words_are_whole(folder: Path, screen: str, columns: int) -> None:
    words, expected = SCREENS[screen]
    shown = on_terminal(columns, *words)
    lines = [line for line in re.split(r"[\r\n]", ESCAPE.sub("", shown)) if line]
    assert [line for line in lines if len(line) > columns] == []
    text = " ".join(" ".join(lines).split())
    for word in expected:
        assert word in text
    if screen in ("inspect", "tree", "formats"):
        assert [*lines[1].replace(" ", "")] == ["-"] * len(lines[1].replace(" ", "")), "titles take one line"


@pytest.mark.parametrize("screen", ["help", "inspect", "verify", "error", "usage"])
def test_colours(folder: Path, screen: str) -> None:
    words, _ = SCREENS[screen]
    assert "\x1b[" in on_terminal(80, *words)
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert not re.search(r"\x1b\[[\d;]*m", on_terminal(80, *words, **variables))


def test_progress_is_drawn_and_taken_away(folder: Path) -> None:
    shown = on_terminal(80, "convert", "a.safetensors", "x.pth", "--no-fsync")
    assert shown.rstrip().splitlines()[-1].replace("\x1b[0m", "").endswith("/s).")
    assert "\r\x1b[K" in shown, "the bar's line is cleared"
    bars = [part for part in re.split(r"\r\x1b\[K|\n", shown) if "%" in part]
    assert all(len(ESCAPE.sub("", bar)) <= 80 for bar in bars)
