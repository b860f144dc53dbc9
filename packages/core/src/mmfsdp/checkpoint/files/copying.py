"""Copies tensors between files through a small buffer, and compares checksums on the way.

The kernel's own copy between files (``copy_file_range``, ``sendfile``) takes one and a half times as long wherever
source and target do not begin at the same offset of a page, which is nearly always; and a checksum needs another pass
then. See docs/adr/0002-extents.md.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mmfsdp.basics.descriptors import read_into
from mmfsdp.checkpoint.chunks import Record
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles, read_errors, truncated, write_all
from mmfsdp.checkpoint.files.elements import packed_blocks
from mmfsdp.checkpoint.files.streamed_sums import StreamedSums, whole_runs
from mmfsdp.checkpoint.geometry import ByteRun, StridedRun, byte_runs
from mmfsdp.checkpoint.integrity import crc32, crc32_combine, crc32_of_stretch
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["BlockWriter", "Copier", "CopyTarget", "RecordKey", "reserve", "write_at"]

_BLOCK = 1 << 19  # bytes that are read at once to be compared only
RecordKey = tuple[Path, int, int]
"""A record: its file, its first byte and its number of bytes."""


class CopyTarget(Protocol):
    """The target of a `Copier`; see `BlockWriter`."""

    def room(self, at: int, most: int) -> memoryview:
        """Return memory for 1 to ``most`` bytes at byte ``at``."""

    def filled(self, count: int) -> None:
        """Note that the first ``count`` bytes of the ``room`` are there."""


def write_at(writer: CopyTarget, data: bytes | memoryview, at: int) -> None:
    """Write bytes at byte ``at``."""
    view = memoryview(data)
    while view:
        room = writer.room(at, len(view))
        room[:] = view[: len(room)]
        writer.filled(len(room))
        view, at = view[len(room) :], at + len(room)


class Copier:
    """Copies tensors into files, in constant memory, for one thread at a time.

    Args:
        advance: Called with the number of bytes after each block; an error that it raises stops the copy.
        writer: Writes to the target file.
        verified: The source records whose CRC-32 was compared, shared by all threads: the first thread that meets a
            record compares it. ``None`` compares nothing.
    """

    def __init__(
        self, advance: Callable[[int], None], writer: CopyTarget, *, verified: set[RecordKey] | None = None
    ) -> None:
        self._advance = advance
        self.writer = writer
        self._verified = verified
        self._files = OpenFiles()
        self._buffer = memoryview(bytearray(_BLOCK))

    def expect(self, extents: Iterable[tuple[Path, int, int]]) -> None:
        """Say what will be read; see `OpenFiles.expect`."""
        self._files.expect(extents)

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

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
        if (computed := entry.blocks(self._files)) is not None:
            return self._compute(entry, computed, at)
        runs = byte_runs(entry)
        stored = self._stored(entry, {(run.file, run.source, run.length) for run in runs if isinstance(run, ByteRun)})
        crc = 0
        for run in runs:
            if isinstance(run, StridedRun):
                packed = packed_blocks(self._files.descriptor(run.file), run, entry.name)
                crc = self._write(packed, at + run.target, crc)
            else:
                own = self._copy(run, at + run.target, entry.name, stored.get((run.file, run.source, run.length)))
                crc = crc32_combine(crc, own, run.length)
        return crc

    def _stored(self, entry: TensorEntry, whole: Collection[RecordKey]) -> dict[RecordKey, int]:
        """Return the stored checksums that stand for the data, and check records that are read in part.

        Args:
            entry: The tensor.
            whole: The runs of bytes that are read of it; a stored checksum stands for a run that is a whole record.
        """
        stored = {}
        for chunk in entry.chunks():
            if (key := (chunk.file, chunk.offset, chunk.nbytes)) in whole and chunk.crc32 is not None:
                stored[key] = chunk.crc32
            elif chunk.record is not None:
                self._check(chunk.record, entry.name)
        return stored

    def _compute(self, entry: TensorEntry, blocks: Iterator[memoryview], at: int) -> int:
        """Write a computed tensor, and compare records with their checksums while they are read for it."""
        due = {key: crc for key, crc in self._stored(entry, whole_runs(entry)).items() if self._is_due(key)}
        sums = StreamedSums(due)
        self._files.observer = sums.see if due else None
        try:
            crc = self._write(blocks, at)
        finally:
            self._files.observer = None
        for (file, offset, nbytes), expected in due.items():
            found = sums.found.get((file, offset, nbytes))
            if found is None:  # it was read in another order, or not to its end
                found = self._sum(file, offset, nbytes, entry.name)
            if found != expected:
                raise _damaged(file, offset, entry.name, found, expected)
        return crc

    def _write(self, blocks: Iterable[bytes | memoryview], at: int, crc: int = 0) -> int:
        """Write blocks one after the other; return their CRC-32, joined to the one of what comes before them."""
        for block in blocks:
            write_at(self.writer, block, at)
            at += len(block)
            crc = crc32(block, crc)
            self._advance(len(block))
        return crc

    def _copy(self, run: ByteRun, at: int, name: str, stored: int | None) -> int:
        """Copy a run and return its CRC-32: the stored one if there is one and it need not be compared."""
        check = stored is not None and self._is_due((run.file, run.source, run.length))
        count = stored is None or check
        source, done, crc = self._files.descriptor(run.file), 0, 0
        while done < run.length:
            view = self.writer.room(at + done, run.length - done)
            with read_errors(run.file):
                size = read_into(source, view, run.source + done)
            if size == 0:
                raise truncated(run.file, name, run.source + done)
            if count:
                crc = crc32(view[:size], crc)
            self.writer.filled(size)
            done += size
            self._advance(size)
        if check and crc != stored:
            raise _damaged(run.file, run.source, name, crc, stored)
        return crc if stored is None else stored

    def _is_due(self, record: RecordKey) -> bool:
        """Tell whether a record must be compared now, and note that it is."""
        if self._verified is None or record in self._verified:
            return False
        self._verified.add(record)
        return True

    def _check(self, record: Record, name: str) -> None:
        if record.crc32 is not None and self._is_due((record.file, record.offset, record.nbytes)):
            found = self._sum(record.file, record.offset, record.nbytes, name)
            if found != record.crc32:
                raise _damaged(record.file, record.offset, name, found, record.crc32)

    def _sum(self, file: Path, offset: int, nbytes: int, name: str) -> int:
        source = self._files.descriptor(file)
        with read_errors(file):
            found, stop = crc32_of_stretch(source, offset, offset + nbytes, advance=self._go_on, buffer=self._buffer)
        if stop < offset + nbytes:
            raise truncated(file, name, stop)
        return found

    def _go_on(self, _: int) -> None:
        self._advance(0)


def _damaged(file: Path, offset: int, name: str, found: int, expected: int | None) -> CorruptCheckpointError:
    why = f"its CRC-32 is {found:08x} (expected {expected:08x})"
    return damaged(f"The data of tensor {name!r} in {file.name}", why, file, offset)


_CACHED = 1 << 19  # bytes: 1 MB no longer fits the second-level cache of most processors
_PUSHED = 8 << 20  # bytes: a disk needs long requests
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class BlockWriter:
    """Writes bytes to offsets of a file, in constant memory, for one thread at a time.

    ``room`` says where to put the bytes; they are in the file at the end of ``to``.

    Args:
        durable: Whether the caller will sync the file: then the disk begins to write at once, every few megabytes, and
            the kernel may use their pages again, instead of keeping them all until the sync.
    """

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._memory = memoryview(bytearray(_CACHED))
        self._base = 0  # offset of the memory in the file, a whole number of pages
        self._begin = self._end = 0  # the part of the memory that is still to be written
        self._dirty: tuple[int, int, int] | None = None  # what the disk has not begun to write: bytes, from, and to

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Write to an existing file within the block; at its end everything is written.

        Raises:
            OSError: The file cannot be written, here or from ``room``.
        """
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield
            self._flush()
            self._push()
        finally:
            os.close(self._file)
            self._base = self._begin = self._end = 0
            self._dirty = None

    def room(self, at: int, most: int) -> memoryview:
        """Return memory for the bytes at an offset of the file; call ``filled`` when they are there.

        Args:
            at: Offset in the file in bytes.
            most: How many contiguous bytes will be written from there, at least 1.

        Returns:
            Room for 1 to ``most`` bytes, no more than fit the processor's cache.
        """
        if at != self._base + self._end or self._end == _CACHED:
            self._flush()
            self._begin = self._end = at % mmap.PAGESIZE  # so that blocks end between pages
            self._base = at - self._begin
        return self._memory[self._end : min(self._end + most, _CACHED)]

    def filled(self, count: int) -> None:
        """Note that the first ``count`` bytes of the ``room`` are to be written."""
        self._end += count

    def _flush(self) -> None:
        first, last = self._base + self._begin, self._base + self._end
        write_all(self._file, self._memory[self._begin : self._end], first)
        self._begin = self._end
        if self._durable and first < last:
            count, begin, end = self._dirty or (0, first, last)
            self._dirty = count + last - first, min(begin, first), max(end, last)
            if self._dirty[0] >= _PUSHED:
                self._push()

    def _push(self) -> None:
        """Let the disk begin to write; the kernel forgets clean pages of the range, and does not wait for others."""
        if self._dirty is not None:
            _, begin, end = self._dirty
            if hasattr(os, "posix_fadvise"):  # Linux has it
                os.posix_fadvise(self._file, begin, end - begin, os.POSIX_FADV_DONTNEED)
            self._dirty = None


def reserve(descriptor: int, size: int) -> None:
    """Give an empty file its size, and all its room on disk where the file system can do that.

    A disk that is too small is reported before anything is written. And the kernel takes less time to write to blocks
    that are already chosen (docs/adr/0002-extents.md).

    Args:
        descriptor: The file, open for writing.
        size: Its size in bytes.

    Raises:
        OSError: There is no room for it.
    """
    # os.posix_fallocate() writes to every block where the file system cannot reserve; this call only asks.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # Linux has it
    while allocate is not None and size:
        if allocate(descriptor, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
            return
        code = ctypes.get_errno()
        if code in _FULL:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            break
    os.truncate(descriptor, size)
