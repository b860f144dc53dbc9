"""Shows how far a command has come: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from mmfsdp_cli.printing.console import is_quiet, terminal_width

__all__ = ["byte_progress", "count_progress"]

Progress = Callable[[int, int], None]

_SECONDS_PER_LINE = 5.0
_SECONDS_PER_BAR = 0.1
_WIDEST = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


@contextmanager
def byte_progress(quiet: bool) -> Iterator[Progress | None]:
    """Give a callback for bytes done and bytes in all.

    Args:
        quiet: Show nothing.
    """
    from mmfsdp.basics import human_bytes

    with _progress(quiet, human_bytes, rate=True) as progress:
        yield progress


@contextmanager
def count_progress(quiet: bool, unit: str) -> Iterator[Progress | None]:
    """Give a callback for things that are counted one by one, such as ``elements``; see ``byte_progress``."""
    with _progress(quiet, "{:,}".format, unit=f" {unit}") as progress:
        yield progress


@contextmanager
def _progress(
    quiet: bool, text: Callable[[int], str], *, unit: str = "", rate: bool = False
) -> Iterator[Progress | None]:
    stream = sys.stderr
    if quiet or is_quiet() or stream is None:  # None: closed by the process that started this one
        yield None
    elif not stream.isatty():
        yield _line_printer(stream, text, unit)
    else:
        try:
            yield _bar(stream, text, unit, rate)
        finally:
            stream.write("\r\x1b[K")
            stream.flush()


def _bar(stream: TextIO, text: Callable[[int], str], unit: str, rate: bool) -> Progress:
    began = time.monotonic()
    drawn = 0.0

    def show(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn < _SECONDS_PER_BAR:
            return
        drawn = now
        said = f" {100 * done // max(total, 1):3} %  {text(done)} of {text(total)}{unit}"
        if done and now - began >= 1:
            speed = done / (now - began)
            said += f"  {text(int(speed))}/s" if rate else ""
            said += f"  {_clock((total - done) / speed)} left"
        width = min((terminal_width(stream) or 80) - len(said) - 1, _WIDEST)
        eighths = round(8 * width * done / max(total, 1))
        full, part = divmod(eighths, 8)
        bar = f"{'█' * full}{_EIGHTHS[part].strip()}".ljust(width, "░") if width >= 8 else ""
        stream.write(f"\r\x1b[K{bar}{said}")
        stream.flush()

    return show


def _line_printer(stream: TextIO, text: Callable[[int], str], unit: str) -> Progress:
    printed = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= _SECONDS_PER_LINE:
            printed = now
            print(f"{100 * done // max(total, 1)} %  {text(done)} of {text(total)}{unit}", file=stream)

    return show


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
