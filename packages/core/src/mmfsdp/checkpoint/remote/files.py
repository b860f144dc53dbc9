"""An open file on a server: reads ranges of it, and reads ahead where it is read in order."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator

from mmfsdp.basics.descriptors import VirtualFile, close, read_into, size_of
from mmfsdp.checkpoint.remote.reading_ahead import REQUEST, ReadAhead
from mmfsdp.checkpoint.remote.sessions import Session, copied
from mmfsdp.checkpoint.remote.urls import Url

__all__ = ["RemoteFile", "RemoteStream"]

_NEAR = 1 << 20  # bytes that a reader may skip and still read in order
_WINDOW = 16 << 20  # bytes that are read ahead of a reader who has announced nothing
_LEAST = 1 << 16  # bytes of a single request
_GAP = 1 << 14  # bytes between two short extents up to which one request brings both


class RemoteFile(VirtualFile):
    """A file on a server, for one reader at a time.

    Args:
        session: What is known of the server's files.
        url: The file.
        ahead: What has been announced of this file and others; without it, the file announces what follows to itself
            as soon as it is read in order.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It cannot be read.
    """

    def __init__(self, session: Session, url: Url, ahead: ReadAhead | None) -> None:
        self._session, self._url, self._announced = session, url, ahead
        self._info = session.file(url)
        self._own: ReadAhead | None = None
        self._last = -1  # where the last read ended
        self._block: tuple[int, bytes] = (0, b"")

    @property
    def size(self) -> int:
        return self._info.size

    def read_into(self, view: memoryview, at: int) -> int:
        view = view[: max(0, self.size - at)]
        if not view:
            return 0
        count = self._held(view, at) or (self._announced and self._announced.read_into(self._url, view, at))
        count = count or self._read(view, at)
        self._last = at + count
        return count

    def _read(self, view: memoryview, at: int) -> int:
        """Read what nobody has announced."""
        in_order = 0 <= at - self._last <= _NEAR if self._last >= 0 else False
        if in_order and self._own is None:
            self._own = ReadAhead(iter([(self._session, self._url, at, self.size)]), _WINDOW)
        if self._own is not None:
            if count := self._own.read_into(self._url, view, at):
                return count
            self._own.stop()
            self._own = None
        if len(view) < _LEAST:
            begin, data = self._block = at, self._fetched(at, min(_LEAST, self.size - at))
            return copied(view, at, begin, data)
        data = self._fetched(at, min(len(view), REQUEST))
        return copied(view, at, at, data)

    def _fetched(self, at: int, count: int) -> bytes:
        return bytes(self._session.read(self._url, at, at + count))

    def _held(self, view: memoryview, at: int) -> int:
        """Read what has come already."""
        return self._session.held(self._url, view, at) or copied(view, at, *self._block)

    def expect(self, extents: Iterable[tuple[int, int]]) -> None:
        there = ((self._session, self._url, at, min(at + count, self.size)) for at, count in extents)
        self._own = ReadAhead(there)

    def prefetch(self, extents: Iterable[tuple[int, int]]) -> None:
        blank = memoryview(bytearray(1))
        wanted = [(at, min(at + count, self.size)) for at, count in extents if not self._held(blank, at)]
        joined = [*_joined(sorted(extent for extent in wanted if extent[0] < extent[1]))]
        answers = [(begin, self._session.submit(self._url, begin, end)) for begin, end in joined]
        for begin, answer in answers:
            self._session.keep(self._url, begin, bytes(answer.result()))

    def close(self) -> None:
        if self._own is not None:
            self._own.stop()
        self._session.check_unchanged(self._url)


def _joined(extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    held: tuple[int, int] | None = None
    for begin, end in extents:
        if held is not None and begin - held[1] <= _GAP and end - held[0] <= REQUEST:
            held = held[0], max(held[1], end)
            continue
        if held is not None:
            yield held
        held = begin, end
    if held is not None:
        yield held


class RemoteStream(io.RawIOBase):
    """A file on a server as Python's own files are: with a position to read from, and a descriptor.

    Args:
        descriptor: The open file; it is closed with this.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size_of(self._descriptor)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: object) -> int:
        count = read_into(self._descriptor, memoryview(buffer).cast("B"), self._at)  # type: ignore[arg-type]
        self._at += count
        return count

    def readall(self) -> bytes:
        view = memoryview(bytearray(max(0, size_of(self._descriptor) - self._at)))
        done = 0
        while done < len(view) and (count := self.readinto(view[done:])):
            done += count
        return bytes(view[:done])

    def close(self) -> None:
        if not self.closed:
            super().close()
            close(self._descriptor)
