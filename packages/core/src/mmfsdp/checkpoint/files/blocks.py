"""Writes new files in large blocks, past the page cache where their data must reach the disk.

One rule decides between the two ways of writing. A file that must be on disk in the end is written with direct I/O if
its file system allows that. Every other file is written through the page cache. See docs/adr/0002-extents.md.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmfsdp.checkpoint.files.opening import write_all

__all__ = ["BlockWriter", "open_direct", "reserve"]

_CACHED = 1 << 19  # bytes: 1 MB no longer fits the second-level cache of most processors
_DIRECT = 4 << 20  # bytes: a disk needs long requests
_WORTHWHILE = 1 << 20  # bytes below which a direct request takes longer than a copy to the page cache
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class BlockWriter:
    """Writes bytes to places of a file, in constant memory, for one thread at a time.

    ``room`` says where to put the bytes; they are in the file at the end of ``to``. Blocks begin and end between pages
    of the file, which direct I/O requires. Where the bytes are not contiguous, the rest of a page goes through the
    page cache. So no page is ever written both ways.

    Args:
        direct: Whether to write past the page cache, where the file system allows it.
    """

    def __init__(self, *, direct: bool) -> None:
        self._wanted = direct
        # Aligned to pages; pages that are never touched take no memory.
        self._memory = memoryview(mmap.mmap(-1, _DIRECT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._base = 0  # offset of the memory in the file, a whole number of pages
        self._begin = self._end = 0  # the part of the memory that is still to be written
        self._limit = 0  # the end of the block
        self._direct: int | None = None

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Write to an existing file within the block; at its end everything is written.

        Raises:
            OSError: The file cannot be written, here or from ``room``.
        """
        self._buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._direct = open_direct(path) if self._wanted else None
            try:
                yield
                self._flush()
            finally:
                if self._direct is not None:
                    os.close(self._direct)
        finally:
            os.close(self._buffered)
            self._base = self._begin = self._end = self._limit = 0

    def room(self, at: int, most: int) -> memoryview:
        """Return memory for the bytes at a place of the file; call ``filled`` when they are there.

        Args:
            at: Offset in the file in bytes.
            most: How many contiguous bytes will be written from there, at least 1.

        Returns:
            Room for 1 to ``most`` bytes, no more than fit the processor's cache.
        """
        if at != self._base + self._end or self._end == self._limit:
            self._flush()
            self._begin = self._end = at % mmap.PAGESIZE
            self._base = at - self._begin
            self._limit = _CACHED if self._direct is None else _DIRECT
        return self._memory[self._end : min(self._end + most, self._end + _CACHED, self._limit)]

    def filled(self, count: int) -> None:
        """Note that the first ``count`` bytes of the ``room`` are to be written."""
        self._end += count

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Write bytes at byte ``at`` of the file."""
        view = memoryview(data)
        while view:
            room = self.room(at, len(view))
            room[:] = view[: len(room)]
            self.filled(len(room))
            view, at = view[len(room) :], at + len(room)

    def _flush(self) -> None:
        begin, end = self._begin, self._end
        first, last = begin + -begin % mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if self._direct is not None and last - first >= _WORTHWHILE:
            self._write_buffered(begin, first)
            begin = first + self._write_direct(self._direct, first, last)
        self._write_buffered(begin, end)
        self._begin = end

    def _write_buffered(self, begin: int, end: int) -> None:
        write_all(self._buffered, self._memory[begin:end], self._base + begin)

    def _write_direct(self, descriptor: int, begin: int, end: int) -> int:
        """Write whole pages and return the number of bytes written: fewer if there was no more room."""
        try:
            return os.pwrite(descriptor, self._memory[begin:end], self._base + begin)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # the file system allows opening a file so, but asks for another alignment


def open_direct(path: Path) -> int | None:
    """Open a file for direct I/O, where that helps.

    It helps only on a file system on a block device of this machine (its device has a major number). On others, such
    as network file systems, one request after the other takes longer than what their clients do in the background.

    Args:
        path: An existing file.

    Returns:
        A descriptor to write whole pages with, at offsets of whole pages; ``None`` where there is no direct I/O.

    Raises:
        OSError: The file does not exist.
    """
    flag = getattr(os, "O_DIRECT", 0)  # Linux has it
    if not flag or os.major(path.stat().st_dev) == 0:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
    except OSError:
        return None  # EINVAL: the file system has no direct I/O. Buffered writing reports any other error.


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
