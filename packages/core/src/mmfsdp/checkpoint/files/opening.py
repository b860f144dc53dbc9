"""Keeps a bounded number of a checkpoint's files open for reading, and notices when one of them is replaced."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from mmfsdp.checkpoint.files.file_errors import read_errors
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["OpenFiles", "write_all"]

_OPEN_FILES = 64


class OpenFiles:
    """Keeps the most recently read files open; a context manager that closes them.

    A file that is opened again must be the one that was read before, with the same size and time of change.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._identities: dict[Path, tuple[int, ...]] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; ``descriptor`` opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def descriptor(self, file: Path) -> int:
        """Return a descriptor of the file for reading. It stays valid until 64 other files have been asked for.

        Raises:
            IncompleteCheckpointError: The file is missing.
            CorruptCheckpointError: The file has changed since it was opened first.
            CheckpointError: The file cannot be opened.
        """
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        try:
            with read_errors(file):
                descriptor = self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(f"{file.name} is missing.", file=str(file)) from error
        found = os.fstat(descriptor)
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        if self._identities.setdefault(file, identity) != identity:
            os.close(self._files.pop(file))
            raise CorruptCheckpointError(
                f"{file.name} changed while it was read: another process replaced or rewrote it. Read the checkpoint "
                "again when no other process writes to it.",
                file=str(file),
            )
        return descriptor


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes at byte ``offset`` of an open file, however many calls that takes."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
