"""Reads the elements of a tensor in order, in blocks of a fixed size, wherever its chunks lie: in constant memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from mmfsdp.checkpoint.extents import StridedRun, byte_runs
from mmfsdp.checkpoint.gathering import packed_blocks
from mmfsdp.checkpoint.layout import TensorEntry
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["BLOCK", "OpenFiles", "tensor_blocks"]

BLOCK = 4 << 20
"""Bytes of a block: a multiple of every item size."""

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
        while self._files:
            os.close(self._files.popitem()[1])

    def descriptor(self, file: Path) -> int:
        """Return a descriptor of the file for reading; it may be closed once 64 other files have been asked for.

        Raises:
            IncompleteCheckpointError: The file is missing.
        """
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        try:
            self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(f"{file.name} is missing.", file=str(file)) from error
        return self._files[file]


def tensor_blocks(files: OpenFiles, entry: TensorEntry, block: int = BLOCK) -> Iterator[memoryview]:
    """Yield a whole tensor, packed in row-major order, in blocks that are full but for the last.

    Args:
        files: The open files to read with.
        entry: The tensor; its chunks must cover it (see ``check_coverage``).
        block: Bytes of a block, a multiple of the item size.

    Yields:
        A view of a buffer that the next block overwrites.

    Raises:
        CorruptCheckpointError: A file ends too early.
    """
    buffer = memoryview(bytearray(min(block, entry.nbytes)))
    filled = 0
    for run in byte_runs(entry):
        if isinstance(run, StridedRun):
            for piece in packed_blocks(files.descriptor(run.file), run):
                if not piece:
                    raise _truncated(run.file, entry.name, run.source)
                rest = memoryview(piece)
                while rest:
                    count = min(len(rest), len(buffer) - filled)
                    buffer[filled : filled + count] = rest[:count]
                    rest, filled = rest[count:], filled + count
                    if filled == len(buffer):
                        yield buffer
                        filled = 0
            continue
        source, end = run.source, run.source + run.length
        while source < end:
            # Asked for anew each time: while the reader of a block is at work, others may have used the files.
            view = buffer[filled : filled + min(end - source, len(buffer) - filled)]
            count = os.preadv(files.descriptor(run.file), [view], source)
            if count == 0:
                raise _truncated(run.file, entry.name, source)
            source, filled = source + count, filled + count
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _truncated(file: Path, name: str, offset: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{file.name} is truncated: it ends within tensor {name!r}.", file=str(file), offset=offset
    )
