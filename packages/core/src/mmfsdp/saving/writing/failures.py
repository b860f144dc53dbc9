"""Reports saves that fail in the background: at once in the log, and in the exit code of a process that never asked."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["EXIT_CODE", "Failures", "failures", "log_failure"]

EXIT_CODE = 120
"""The exit code of the process: Python's own for an error while it shuts down (see ``sys.exit``)."""

_FRAMES = 3  # of the traceback; an error of mmfsdp names the cause
_log = logging.getLogger("mmfsdp.saving")


def log_failure(path: object, error: BaseException, rank: int) -> None:
    """Log that a save failed, with the end of its traceback. Not collective.

    Args:
        path: Where the checkpoint would be.
        error: Why it is not there.
        rank: This rank's index in the mesh.
    """
    text = "".join(traceback.format_exception(error, chain=False, limit=-_FRAMES)).rstrip()
    _log.error(
        "The background save to %r failed on rank %d. result() or the next save raises this error.\n%s",
        str(path),
        rank,
        text,
    )
    _log.debug("The whole traceback:", exc_info=error)


class Failures:
    """The background saves of a process. If one failed and nobody got its error, the process exits with `EXIT_CODE`."""

    def __init__(self) -> None:
        self._saves: list[_Save] = []

    def watch(self, path: object, future: Future[None], is_told: Callable[[], bool]) -> None:
        """Add a save that has begun.

        Args:
            path: Where the checkpoint will be.
            future: That of the thread that saves.
            is_told: Returns whether somebody has got the save's error.
        """
        self._saves = [save for save in self._saves if save.is_running or save.failed_untold]
        self._saves.append(_Save(path, future, is_told))

    def settle(self) -> None:
        """Wait until every save has ended."""
        wait([save.future for save in self._saves])

    def show(self) -> bool:
        """Log which errors nobody has got; return whether there are any."""
        paths = [repr(str(save.path)) for save in self._saves if save.failed_untold]
        if paths:
            _log.error(
                "Nobody called result() of the failed background save to %s: this process exits with code %d.",
                ", ".join(paths),
                EXIT_CODE,
            )
        return bool(paths)


@dataclass(frozen=True, slots=True)
class _Save:
    path: object
    future: Future[None]
    is_told: Callable[[], bool]

    @property
    def is_running(self) -> bool:
        return not self.future.done()

    @property
    def failed_untold(self) -> bool:
        return self.future.done() and self.future.exception() is not None and not self.is_told()


@cache
def failures() -> Failures:
    """Return the process's failed saves, and see to its exit code on first use."""
    found = Failures()
    if multiprocessing.parent_process() is None:
        atexit.register(_end_main, found)
    else:  # a child of multiprocessing runs its finalizers, and nothing of atexit
        multiprocessing.util.Finalize(None, _end_child, (found,), exitpriority=-100)
    return found


def _end_main(found: Failures) -> None:
    found.settle()
    if getattr(sys, "last_value", None) is None and found.show():  # otherwise the exit code is 1 already
        sys.stderr = _FailingStream(sys.stderr)


def _end_child(found: Failures) -> None:
    found.settle()  # it waits for threads only later
    if found.show():
        sys.exit(EXIT_CODE)


class _FailingStream:
    """A stream whose last flush fails.

    When atexit runs, Python has already decided on the exit code. It changes that only if it cannot flush the standard
    streams afterwards. ``os._exit`` would also set the code, but skip the exit handlers of others.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a background save failed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
