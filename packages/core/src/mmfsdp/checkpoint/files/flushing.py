"""Brings files to disk while they are still being written, so that the wait at the end is short."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

__all__ = ["Flusher"]

_PAUSE = 0.05  # seconds
_FILES = 256  # open files at most; what is beyond is synced at the end as ever


class Flusher:
    """Syncs files again and again, while they change, in a thread of its own; a context that ends the thread.

    Args:
        files: The files; they exist.

    Raises:
        OSError: The disk failed, at the end of the context: the kernel says so once only, so it must not be lost.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = list(files)[:_FILES]
        self._changed: set[Path] = set()
        self._over = threading.Event()
        self._error: OSError | None = None
        # A daemon: an interrupt between its start and the block that ends it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="mmfsdp-flush", daemon=True)

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def changed(self, file: Path) -> None:
        """Note that a file was written to through the page cache."""
        self._changed.add(file)

    def _run(self) -> None:
        descriptors: dict[Path, int] = {}
        try:
            for file in self._files:
                descriptors[file] = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            while not self._over.wait(_PAUSE):
                for file, descriptor in descriptors.items():
                    if file in self._changed and not self._over.is_set():
                        self._changed.discard(file)  # before: what is written meanwhile is for the next time
                        os.fsync(descriptor)
        except OSError as error:
            self._error = error
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
