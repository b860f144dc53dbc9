"""Moves byte runs between files with the operating system's own copy, and checks checksums on the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType

from mmfsdp.checkpoint.casting import CastEntry, converted_blocks
from mmfsdp.checkpoint.crc import crc32, crc32_combine, crc32_of_stretch
from mmfsdp.checkpoint.extents import Run, StridedRun, byte_runs
from mmfsdp.checkpoint.gathering import packed_blocks
from mmfsdp.checkpoint.layout import Record, TensorEntry
from mmfsdp.checkpoint.open_files import OpenFiles, reading, truncated, write_all
from mmfsdp.checkpoint.tracking import Tracker
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["Copier"]

_PIECE = 16 << 20  # bytes per call to the kernel, so that progress moves and an interrupt is heard
_BLOCK = 1 << 20  # bytes per read where data passes through here: fits the second-level cache

# What says "not between these files", rather than "this went wrong". EIO does not say which of the two failed: plain
# reads and writes do.
_UNSUPPORTED = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EIO}


class Copier:
    """Copies tensors into open files, in constant memory, for one thread at a time.

    Args:
        tracker: Told of each piece that was copied; what it raises stops the copy.
        verified: Where to note the source records whose CRC-32 was compared: every one that has a CRC-32 is compared
            with it by the first thread that meets it here, before that copies any of it. Without one nothing is
            compared.
    """

    def __init__(self, tracker: Tracker, *, verified: set[object] | None = None) -> None:
        self._tracker = tracker
        self._verified = verified
        self._files = OpenFiles()
        self._methods = [_copy_file_range, _sendfile] if hasattr(os, "copy_file_range") else [_sendfile]
        self._buffer = memoryview(bytearray(_BLOCK))

    def __enter__(self) -> Copier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def copy_tensor(self, entry: TensorEntry, target: int, at: int) -> int:
        """Copy a whole tensor, packed in row-major order, to byte ``at`` of a file.

        Args:
            entry: The tensor; its chunks must cover it (see ``check_coverage``).
            target: Descriptor of the file to write.
            at: Offset in that file in bytes.

        Returns:
            The CRC-32 of what is written, from the stored ones where they suffice.

        Raises:
            CorruptCheckpointError: A source record does not match its CRC-32, or its file ends too early.
        """
        if self._verified is not None:
            for chunk in entry.chunks:
                if chunk.record is not None:
                    self._check(chunk.record, entry.name)
        if isinstance(entry, CastEntry):
            return self._cast(entry, target, at)
        # Stored checksums stand for the data as long as each run is one whole record.
        known = {(chunk.file, chunk.offset, chunk.nbytes): chunk.crc32 for chunk in entry.chunks}
        crc = 0
        for run in byte_runs(entry):
            if isinstance(run, StridedRun):
                crc = self._gather(run, target, at, entry.name, crc)
                continue
            stored = known.get((run.file, run.source, run.length))
            if stored is None:
                crc = self._crc32(run.file, run.source, run.length, entry.name, crc)
            else:
                crc = crc32_combine(crc, stored, run.length)
            self._copy(run, target, at, entry.name)
        return crc

    def _cast(self, entry: CastEntry, target: int, at: int) -> int:
        crc = 0
        for block in converted_blocks(self._files, entry):
            write_all(target, block, at)
            at += len(block)
            crc = crc32(block, crc)
            self._tracker.advance(len(block))
        return crc

    def _copy(self, run: Run, target: int, at: int, name: str) -> None:
        done = 0
        while done < run.length:
            left = min(_PIECE, run.length - done)
            count = self._copy_piece(run.file, target, run.source + done, at + run.target + done, left)
            if count == 0 and self._methods:
                del self._methods[0]  # some file systems say 0 for "not here"; plain reads have the last word
                continue
            if count == 0:
                raise truncated(run.file, name, run.source + done)
            done += count
            self._tracker.advance(count)

    def _copy_piece(self, file: Path, target: int, source_at: int, target_at: int, length: int) -> int:
        source = self._files.descriptor(file)
        while self._methods:
            try:
                return self._methods[0](source, target, source_at, target_at, length)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                del self._methods[0]
        view = self._buffer[: min(length, _BLOCK)]
        with reading(file):
            count = os.preadv(source, [view], source_at)
        write_all(target, view[:count], target_at)
        return count

    def _gather(self, run: StridedRun, target: int, at: int, name: str, crc: int) -> int:
        position = at + run.target
        for block in packed_blocks(self._files.descriptor(run.file), run):
            if not block:
                raise truncated(run.file, name, run.source)
            write_all(target, block, position)
            position += len(block)
            crc = crc32(block, crc)
            self._tracker.advance(len(block))
        return crc

    def _check(self, record: Record, name: str) -> None:
        key = (record.file, record.offset, record.nbytes)
        if record.crc32 is None or self._verified is None or key in self._verified:
            return
        self._verified.add(key)
        found = self._crc32(record.file, record.offset, record.nbytes, name, 0)
        if found != record.crc32:
            raise CorruptCheckpointError(
                f"The data of tensor {name!r} in {record.file.name} is damaged: its CRC-32 is {found:08x} "
                f"(expected {record.crc32:08x}).",
                file=str(record.file),
                offset=record.offset,
            )

    def _crc32(self, file: Path, offset: int, length: int, name: str, crc: int) -> int:
        source, end = self._files.descriptor(file), offset + length
        with reading(file):
            crc, stop = crc32_of_stretch(source, offset, end, crc, advance=self._go_on, buffer=self._buffer)
        if stop < end:
            raise truncated(file, name, stop)
        return crc

    def _go_on(self, _: int) -> None:
        self._tracker.advance(0)


def _copy_file_range(source: int, target: int, source_at: int, target_at: int, length: int) -> int:
    return os.copy_file_range(source, target, length, source_at, target_at)


def _sendfile(source: int, target: int, source_at: int, target_at: int, length: int) -> int:
    os.lseek(target, target_at, os.SEEK_SET)
    return os.sendfile(target, source, source_at, length)
