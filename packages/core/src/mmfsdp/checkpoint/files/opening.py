"""Open files of a checkpoint: a bounded number kept open to read from, and what reading and writing them share."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from mmfsdp.checkpoint.files.file_errors import read_errors
from mmfsdp.errors import IncompleteCheckpointError

__all__ = ["OpenFiles", "write_all"]

_OPEN_FILES = 64


class OpenFiles:
    """Keeps the most recently read files open; a context that closes them."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close them all; files that are asked for later are opened again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def descriptor(self, file: Path) -> int:
        """Return a descriptor of the file for reading; it may be closed once 64 other files have been asked for.

        Raises:
            IncompleteCheckpointError: The file is missing.
            CheckpointError: It cannot be opened.
        """
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        try:
            with read_errors(file):
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(f"{file.name} is missing.", file=str(file)) from error
        return self._files[file]


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes at byte ``offset`` of an open file, however many calls that takes."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
