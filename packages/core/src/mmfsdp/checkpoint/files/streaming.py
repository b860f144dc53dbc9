"""Reads the elements of a tensor in order, in blocks of a fixed size, wherever its chunks lie: in constant memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mmfsdp.checkpoint.files.gathering import packed_blocks
from mmfsdp.checkpoint.files.open_files import OpenFiles, reading, truncated
from mmfsdp.checkpoint.geometry.extents import StridedRun, byte_runs
from mmfsdp.checkpoint.layout import TensorEntry

__all__ = ["BLOCK", "tensor_blocks"]

BLOCK = 4 << 20
"""Bytes of a block: a multiple of every item size."""


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
                    raise truncated(run.file, entry.name, run.source)
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
            descriptor = files.descriptor(run.file)
            with reading(run.file):
                count = os.preadv(descriptor, [view], source)
            if count == 0:
                raise truncated(run.file, entry.name, source)
            source, filled = source + count, filled + count
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]
