"""Writes a file from its beginning to its end, and takes the checksums on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mmfsdp.checkpoint.files.copying import BlockWriter, reserve
from mmfsdp.checkpoint.integrity import crc32
from mmfsdp.checkpoint.manifest import BlockSums, FileEntry

__all__ = ["SummedFile", "copy_into", "summed_file"]


class SummedFile:
    """A new file, open for writing within `summed_file`.

    Args:
        writer: Writes to the file.
    """

    def __init__(self, writer: BlockWriter) -> None:
        self._writer, self._sums = writer, BlockSums()
        self.end = 0
        """How many bytes were written."""

    def write(self, data: Any) -> int:
        """Write bytes, and add them to the checksums."""
        self.append(data)
        return memoryview(data).nbytes

    def append(self, data: Any) -> int:
        """Write bytes, and return their CRC-32. The interpreter's lock is released while many are copied."""
        view, crc = memoryview(data).cast("B"), 0
        while view:
            room = self._writer.room(self.end, len(view))
            copy_into(room, view[: len(room)])
            self._sums.add(room)
            crc = crc32(room, crc)
            self._writer.filled(len(room))
            self.end += len(room)
            view = view[len(room) :]
        return crc

    def flush(self) -> None:
        """Do nothing: everything is written when the file is closed."""

    def entry(self) -> FileEntry:
        """Return the file's entry for the manifest."""
        return self._sums.entry()


@contextmanager
def summed_file(path: Path, *, direct: bool, size: int = 0) -> Iterator[SummedFile]:
    """Make a file, and write to it within the block; at its end all data is on disk.

    Args:
        path: The file, which does not exist yet, or is replaced.
        direct: Write past the page cache where that helps: a copy to it takes the time of processors that train.
        size: How many bytes will be written, if that is known: a disk that is too small says so at once.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("wb") as file:
        reserve(file.fileno(), size)
    writer = BlockWriter(direct=direct)
    with writer.to(path):
        yield SummedFile(writer)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def copy_into(room: memoryview, data: memoryview) -> None:
    """Copy bytes without holding the interpreter's lock, which a slice of a memoryview would do."""
    np.copyto(np.frombuffer(room, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))
