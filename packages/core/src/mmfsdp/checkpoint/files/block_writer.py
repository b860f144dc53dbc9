"""Collects what is written one after the other into blocks of whole pages."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmfsdp.checkpoint.files.direct_io import Ways, open_direct
from mmfsdp.checkpoint.files.open_files import write_all

__all__ = ["BlockWriter"]

_CACHED = 1 << 19  # bytes: half of it would do, twice of it no longer fits the second-level cache of most processors
_DIRECT = 4 << 20  # bytes: a disk wants long requests
_WORTHWHILE = 1 << 20  # bytes below which a request of its own to the disk takes longer than copying


class BlockWriter:
    """Writes bytes to places of a file, in constant memory, for one thread at a time.

    Bytes are put where ``room`` says, and are in the file at the end of ``to`` only. Blocks begin and end between
    pages of the file, except where the bytes do not go on: then what is left of a page goes through the page cache.
    So direct I/O has its alignment, and no page is ever written both ways.

    Args:
        ways: Which way blocks take.
        buffered: Told of each file as a block goes to it through the page cache.
    """

    def __init__(self, ways: Ways, buffered: Callable[[Path], None] = lambda _: None) -> None:
        self._ways = ways
        self._note_buffered = buffered
        # Aligned to pages, and those never touched take no memory.
        self._memory = memoryview(mmap.mmap(-1, _DIRECT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._base = 0  # where the memory begins in the file, a whole number of pages
        self._begin = self._end = 0  # what of the memory is to be written
        self._limit = 0  # the end of the block

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Write to a file, which exists, within the block; at its end all is written.

        Raises:
            OSError: It cannot be written, here or from ``room``.
        """
        self._path = path
        self._buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._direct = open_direct(path)
            if self._direct is None:
                self._ways.no_direct()
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
        """Return where the bytes for a place go; ``filled`` says how many were put there.

        Args:
            at: Offset in the file in bytes.
            most: How many bytes there are to write from there on, at least 1.

        Returns:
            Room for 1 to ``most`` bytes, no more than fit the processor's cache.
        """
        if at != self._base + self._end or self._end == self._limit:
            self._flush()
            self._begin = self._end = at % mmap.PAGESIZE
            self._base = at - self._begin
            self._limit = _DIRECT if self._ways.direct else _CACHED
        return self._memory[self._end : min(self._end + most, self._end + _CACHED, self._limit)]

    def filled(self, count: int) -> None:
        """Note that so many bytes of the ``room`` hold what is to be written."""
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
        if self._limit == _DIRECT and self._direct is not None and last - first >= _WORTHWHILE:
            self._write_buffered(begin, first)
            self._write_buffered(first + self._write_direct(self._direct, first, last), end)
        elif begin < end:
            self._write_buffered(begin, end)
            self._note_buffered(self._path)
        self._begin = end
        self._ways.wrote(end - begin)

    def _write_buffered(self, begin: int, end: int) -> None:
        write_all(self._buffered, self._memory[begin:end], self._base + begin)

    def _write_direct(self, descriptor: int, begin: int, end: int) -> int:
        """Write whole pages, and return how many bytes of them are written: fewer where there was no more room."""
        try:
            return os.pwrite(descriptor, self._memory[begin:end], self._base + begin)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._ways.no_direct()  # it may be opened so, and yet not written: what is asked of alignment is more
            return 0
