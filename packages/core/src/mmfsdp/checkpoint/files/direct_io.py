"""Which way written blocks take: through the page cache (buffered I/O) or straight to the disk (direct I/O)."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Ways", "open_direct"]

_WINDOW = {False: 16 << 20, True: 32 << 20}  # bytes after which a way is judged, by whether it is direct I/O
_PATIENCE = 4  # windows of the faster way until the other is tried again
_GROWTH = 4  # times as many after each trial that changed nothing


def open_direct(path: Path) -> int | None:
    """Open a file for direct I/O, where that helps.

    Only on a file system that lies on a block device of this machine (its device has a major number): on others, such
    as those of networks, one request after the other takes longer than what their clients do in the background.

    Args:
        path: A file that exists.

    Returns:
        A descriptor to write with, whole pages at offsets of whole pages; None where there is no direct I/O.

    Raises:
        OSError: The file cannot be opened at all.
    """
    flag = getattr(os, "O_DIRECT", 0)  # Linux has it
    if not flag or os.major(path.stat().st_dev) == 0:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
    except OSError:
        # EINVAL says that the file system has none. Whatever else it is, writing without it will say it too.
        return None


class Ways:
    """Says for each block which way it takes. Threads that write share one.

    What has to be on disk in the end goes there directly. What has not takes the way that is faster just now: memory
    beats most disks, but not while the kernel waits for pages, free ones or clean ones, and that changes while a file
    is written. All threads together go one way, until it is slower than the other was, or the other is due to be
    tried. See docs/adr/0002-extents.md.

    Args:
        fsync: Whether everything has to be on disk in the end.
        clock: Returns the time in seconds.
    """

    def __init__(self, *, fsync: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.direct = fsync
        """Whether the next block goes past the page cache."""
        self._decided = fsync
        self._clock = clock
        self._lock = threading.Lock()
        self._speed: dict[bool, float] = {}  # bytes per second of all threads together, when each way was last judged
        self._best = False
        self._patience = self._left = _PATIENCE
        self._written, self._since = 0, clock()

    def wrote(self, size: int) -> None:
        """Note that a block was written, of so many bytes."""
        if not self._decided:
            with self._lock:
                self._written += size
                if self._written >= _WINDOW[self.direct]:
                    self._judge()

    def no_direct(self) -> None:
        """Note that there is no direct I/O on this file system."""
        with self._lock:
            self.direct, self._decided = False, True

    def _judge(self) -> None:
        now = self._clock()
        self._speed[self.direct] = self._written / max(now - self._since, 1e-9)
        self._written, self._since = 0, now
        other = not self.direct
        best = self.direct if self._speed[self.direct] >= self._speed.get(other, math.inf) else other
        if best != self._best:
            self._best, self._patience = best, _PATIENCE
            self._left = self._patience
        elif best != self.direct:
            self._patience *= _GROWTH
            self._left = self._patience
        else:
            self._left -= 1
        self.direct = best if self._left else not best
