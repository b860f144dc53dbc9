"""Copies tensors between files through a small buffer, and compares checksums on the way.

The kernel's own copy between files (``copy_file_range``, ``sendfile``) takes one and a half times as long wherever
source and target do not begin at the same place of a page, which is nearly always; and a checksum needs another pass
then. See docs/adr/0002-extents.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from mmfsdp.checkpoint.checksums import crc32, crc32_combine, crc32_of_stretch
from mmfsdp.checkpoint.files.blocks import BlockWriter
from mmfsdp.checkpoint.files.casting import converted_blocks
from mmfsdp.checkpoint.files.elements import packed_blocks
from mmfsdp.checkpoint.files.file_errors import read_errors, truncated
from mmfsdp.checkpoint.files.opening import OpenFiles
from mmfsdp.checkpoint.files.progress import Tracker
from mmfsdp.checkpoint.geometry.extents import Run, StridedRun, byte_runs
from mmfsdp.checkpoint.geometry.views import CastEntry
from mmfsdp.checkpoint.layout import Record, TensorEntry
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["Copier", "RecordKey"]

_BLOCK = 1 << 19  # bytes that are read at once to be compared only

RecordKey = tuple[Path, int, int]
"""A record: its file, its first byte and its number of bytes."""


class Copier:
    """Copies tensors into files, in constant memory, for one thread at a time.

    Args:
        tracker: Counts the bytes copied; an error that it raises stops the copy.
        writer: Writes to the target file.
        verified: The source records whose CRC-32 was compared, shared by all threads: the first thread that meets a
            record compares it. ``None`` compares nothing.
    """

    def __init__(self, tracker: Tracker, writer: BlockWriter, *, verified: set[RecordKey] | None = None) -> None:
        self._tracker = tracker
        self.writer = writer
        self._verified = verified
        self._files = OpenFiles()
        self._buffer = memoryview(bytearray(_BLOCK))

    def __enter__(self) -> Copier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def copy_tensor(self, entry: TensorEntry, at: int) -> int:
        """Copy a whole tensor, packed in row-major order, to byte ``at`` of the target file.

        Args:
            entry: The tensor; its chunks must cover it (see ``check_coverage``).
            at: Offset in the target file in bytes.

        Returns:
            The CRC-32 of the written bytes, combined from stored ones where they suffice.

        Raises:
            CorruptCheckpointError: A source record does not match its CRC-32, or its file ends too early.
        """
        # Stored checksums stand for the data as long as each run is one whole record.
        runs = [] if isinstance(entry, CastEntry) else byte_runs(entry)
        whole = {(run.file, run.source, run.length) for run in runs if isinstance(run, Run)}
        stored = {}
        for chunk in entry.chunks():
            if (key := (chunk.file, chunk.offset, chunk.nbytes)) in whole and chunk.crc32 is not None:
                stored[key] = chunk.crc32
            elif chunk.record is not None:
                self._check(chunk.record, entry.name)
        if isinstance(entry, CastEntry):
            return self._cast(entry, at)
        crc = 0
        for run in runs:
            if isinstance(run, StridedRun):
                crc = self._gather(run, at + run.target, entry.name, crc)
            else:
                own = self._copy(run, at + run.target, entry.name, stored.get((run.file, run.source, run.length)))
                crc = crc32_combine(crc, own, run.length)
        return crc

    def _cast(self, entry: CastEntry, at: int) -> int:
        crc = 0
        for block in converted_blocks(self._files, entry):
            self.writer.write(block, at)
            at += len(block)
            crc = crc32(block, crc)
            self._tracker.advance(len(block))
        return crc

    def _copy(self, run: Run, at: int, name: str, stored: int | None) -> int:
        """Copy a run and return its CRC-32: the stored one if there is one and it need not be compared."""
        check = stored is not None and self._is_due((run.file, run.source, run.length))
        count = stored is None or check
        source, done, crc = self._files.descriptor(run.file), 0, 0
        while done < run.length:
            view = self.writer.room(at + done, run.length - done)
            with read_errors(run.file):
                size = os.preadv(source, [view], run.source + done)
            if size == 0:
                raise truncated(run.file, name, run.source + done)
            if count:
                crc = crc32(view[:size], crc)
            self.writer.filled(size)
            done += size
            self._tracker.advance(size)
        if check and crc != stored:
            raise _damaged(run.file, run.source, name, crc, stored)
        return crc if stored is None else stored

    def _gather(self, run: StridedRun, at: int, name: str, crc: int) -> int:
        for block in packed_blocks(self._files.descriptor(run.file), run):
            if not block:
                raise truncated(run.file, name, run.source)
            self.writer.write(block, at)
            at += len(block)
            crc = crc32(block, crc)
            self._tracker.advance(len(block))
        return crc

    def _is_due(self, record: RecordKey) -> bool:
        """Tell whether a record must be compared now, and note that it is."""
        if self._verified is None or record in self._verified:
            return False
        self._verified.add(record)
        return True

    def _check(self, record: Record, name: str) -> None:
        if record.crc32 is not None and self._is_due((record.file, record.offset, record.nbytes)):
            found = self._crc32(record.file, record.offset, record.nbytes, name)
            if found != record.crc32:
                raise _damaged(record.file, record.offset, name, found, record.crc32)

    def _crc32(self, file: Path, offset: int, length: int, name: str) -> int:
        source, end = self._files.descriptor(file), offset + length
        with read_errors(file):
            crc, stop = crc32_of_stretch(source, offset, end, advance=self._go_on, buffer=self._buffer)
        if stop < end:
            raise truncated(file, name, stop)
        return crc

    def _go_on(self, _: int) -> None:
        self._tracker.advance(0)


def _damaged(file: Path, offset: int, name: str, found: int, expected: int | None) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"The data of tensor {name!r} in {file.name} is damaged: its CRC-32 is {found:08x} (expected {expected:08x}).",
        file=str(file),
        offset=offset,
    )
