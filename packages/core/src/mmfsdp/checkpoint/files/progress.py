"""Counts the bytes that several threads have copied, and stops all of them when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Progress", "StoppedError", "Tracker"]

Progress = Callable[[int, int], None]
"""Called with the bytes copied so far and the bytes to copy in total."""


class StoppedError(Exception):
    """Another thread has failed, or the caller has stopped the work."""


class Tracker:
    """The progress that threads working on one task share.

    Args:
        total: Bytes to copy, for ``progress``.
        progress: Called after each block, never by two threads at once; an error that it raises stops the work.
    """

    def __init__(self, total: int = 0, progress: Progress | None = None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """The first error that stopped the work."""

    def advance(self, count: int) -> None:
        """Add copied bytes; with 0, only check whether to go on.

        Raises:
            StoppedError: The work must stop.
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
