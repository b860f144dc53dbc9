"""Runs the Python and the commands of README.md and docs/, and checks command lines against `mmfsdp-cli --help`."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
SECONDS = 150  # for all blocks of one page

# A terminal wide enough that help is neither wrapped nor cut, without colours.
PLAIN = {"COLUMNS": "240", "TERMINAL_WIDTH": "240", "NO_COLOR": "1", "TERM": "dumb"}
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
SHELL = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line of code (counted from 1) and its text."""

    line: int
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """Return the fenced blocks of a language."""
    found = []
    text = page.read_text()
    pattern = rf"^```{language}[^\n]*\n(?P<text>.*?)^```[ ]*$"
    for match in re.finditer(pattern, text, flags=re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(line, match["text"]))
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


PYTHON_PAGES = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    # One script per page, each block at its own line number, so that a traceback's lines are those of the page.
    lines = [""] * (page.read_text().count("\n") + 1)
    for block in blocks(page, "python"):
        code = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    for block in blocks(page, "console"):
        if "$ mmfsdp-cli" in block.text:
            call = f'__import__("console_blocks").check({block.text!r})'
            lines[block.line - 1] = f'if __name__ == "__main__": {call}'
    script = tmp_path / f"page_{page.stem}.py"  # a script named like a package would hide it
    script.write_text("\n".join(lines))
    directory = tmp_path / "cwd"
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{name(page)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_python_blocks_parse() -> None:
    for page in PAGES:
        for block in blocks(page, "python"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                compile("\n" * (block.line - 1) + block.text, name(page), "exec")


def command_lines() -> list[tuple[str, str]]:
    """Return place and text of every `$ mmfsdp-cli ...` line in console blocks, continuation lines joined."""
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            text = re.sub(r"\\\n\s*>?\s*", " ", block.text)
            found += [(name(page), line[2:].strip()) for line in text.splitlines() if line.startswith("$ mmfsdp-cli")]
    return sorted({*found})


@functools.cache
def help_of(*command: str) -> str | None:
    """Return the help of a command, or None if there is no such command."""
    done = subprocess.run(
        [sys.executable, "-c", "from mmfsdp_cli.main import main; main()", *command, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, **PLAIN},
        check=False,
    )
    return ESCAPE.sub("", done.stdout) if done.returncode == 0 else None


COMMANDS = command_lines()


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_command_lines_exist(page: str, line: str) -> None:
    words = list(itertools.takewhile(lambda word: word not in SHELL, shlex.split(line, comments=True)[1:]))
    command: tuple[str, ...] = ()
    text = help_of()
    assert text is not None, "mmfsdp-cli --help fails"
    while words and re.search(r"Usage:.* COMMAND", text) and not words[0].startswith("-"):
        command = (*command, words.pop(0))
        text = help_of(*command)
        assert text is not None, f"no such command: mmfsdp-cli {' '.join(command)}"
    options = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    missing = [option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)]
    assert missing == [], f"mmfsdp-cli {' '.join(command)} has no {missing}; its help:\n{text}"
