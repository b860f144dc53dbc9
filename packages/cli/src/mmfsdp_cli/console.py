"""What the commands print with: one red line per error, sizes for people, a progress bar on terminals."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from click.exceptions import Exit

__all__ = ["byte_progress", "count_progress", "human_bytes", "reporting_errors", "say", "shown_name"]

_FAILED = 1
_USAGE = 2
_SECONDS_PER_LINE = 5.0
_NAME = 200  # characters


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn errors of the library and of the operating system into a line on stderr and an exit code."""
    from mmfsdp.errors import CheckpointNotFoundError, ConfigError, FormatError, MmfsdpError, PlanError

    try:
        yield
    except MmfsdpError as error:
        usage = isinstance(error, ConfigError | PlanError | CheckpointNotFoundError | FormatError) or _target_exists(
            error
        )
        _complain(str(error), _USAGE if usage else _FAILED)
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Exit(0) from None
    except OSError as error:
        _complain(f"{error.strerror or error} [file={error.filename!r}]" if error.filename else str(error), _FAILED)
    except KeyboardInterrupt:
        _complain("Interrupted; nothing was written.", 130)


def say(text: str, *, colour: str | None = None, err: bool = False) -> None:
    """Print lines; what in them would move a terminal's cursor or change its colours is shown, and not done.

    Args:
        text: The lines.
        colour: Colour on a terminal.
        err: Print to stderr.
    """
    click.secho("\n".join(map(_visible, text.split("\n"))), fg=colour, err=err)


def shown_name(name: str) -> str:
    """Return a tensor's name as a table shows it: in one line, and not longer than a line can be."""
    name = _visible(name)
    return name if len(name) <= _NAME else f"{name[: _NAME // 2]}...{name[-_NAME // 2 :]}"


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def human_bytes(count: int) -> str:
    """Return a number of bytes in decimal units, such as ``'1.23 GB'``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{int(value)} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


@contextmanager
def byte_progress(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a progress callback: a bar with rate and time left on a terminal, a line every few seconds otherwise.

    Args:
        quiet: Show nothing.
    """
    with _progress(quiet, human_bytes) as progress:
        yield progress


@contextmanager
def count_progress(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a progress callback for things that are counted one by one; see ``byte_progress``."""
    with _progress(quiet, None) as progress:
        yield progress


@contextmanager
def _progress(quiet: bool, text: Callable[[int], str] | None) -> Iterator[Callable[[int, int], None] | None]:
    if quiet:
        yield None
    elif sys.stderr is not None and sys.stderr.isatty():  # None: closed by who started this
        with _bar(in_bytes=text is not None) as advance:
            yield advance
    else:
        yield _line_printer(text or str)


@contextmanager
def _bar(in_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    shown = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    console = Console(stderr=True)
    with Progress(BarColumn(), *shown, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _line_printer(text: Callable[[int], str]) -> Callable[[int, int], None]:
    printed = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= _SECONDS_PER_LINE:
            printed = now
            click.echo(f"{100 * done // total} %  {text(done)} of {text(total)}", err=True)

    return show


def _target_exists(error: Exception) -> bool:
    from mmfsdp.checkpoint import TargetExistsError

    return isinstance(error, TargetExistsError)


def _complain(message: str, code: int) -> None:
    say(f"error: {message}", colour="red", err=True)
    raise Exit(code)
