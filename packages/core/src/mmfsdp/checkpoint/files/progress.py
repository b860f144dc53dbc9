"""Counts what threads have copied: one progress for all of them, and one word that stops them all."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Progress", "StoppedError", "Tracker"]

Progress = Callable[[int, int], None]
"""Called with the bytes copied so far and the bytes to copy in total."""


class StoppedError(Exception):
    """Another thread has failed, or the caller wants no more."""


class Tracker:
    """What threads at work on one thing share.

    Args:
        total: Bytes to copy, for ``progress``.
        progress: Called after each piece, never by two threads at once; what it raises stops the work.
    """

    def __init__(self, total: int = 0, progress: Progress | None = None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """What stopped the work first."""

    def advance(self, count: int) -> None:
        """Note that bytes were copied; 0 only asks whether to go on.

        Raises:
            StoppedError: The work is to stop.
        """
        if self.failure is not None:
            raise StoppedError
        if count:
            with self._lock:
                if self.failure is not None:  # of a thread that had the lock until now
                    raise StoppedError
                self._done += count
                try:
                    if self._progress is not None:
                        self._progress(self._done, self._total)
                except BaseException as error:
                    self.failure = error
                    raise

    def stop(self, failure: BaseException) -> None:
        """Make every further ``advance`` raise; the first failure is kept."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
