"""Requests the bytes that will be read next while others are in use, so that a link is busy in spite of its latency."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from mmfsdp.checkpoint.remote.sessions import Session
from mmfsdp.checkpoint.remote.urls import Url

__all__ = ["REQUEST", "WINDOW", "Extent", "ReadAhead"]

REQUEST = 4 << 20
"""Bytes of a request: an answer that takes much longer than the latency of most links."""
WINDOW = 96 << 20
"""Bytes that are held, on the way, or wait for a thread: so threads are busy although one answer comes late."""
_GAP = 1 << 16  # bytes that nobody wants between two extents up to which one request brings both


class Extent(NamedTuple):
    """Consecutive bytes of a file."""

    session: Session
    url: Url
    begin: int
    end: int


class _RangeRequest:
    __slots__ = ("answer", "extent", "used")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.used = False
        session, url, begin, end = extent
        self.answer: Future[bytearray] = session.submit(url, begin, end)


class ReadAhead:
    """Reads extents in the order in which they will be used, up to ``WINDOW`` bytes ahead.

    Args:
        extents: What will be read. It is asked for more while reading goes on. What is read in another order, or not
            announced, is not found here, and nothing worse.
        window: Bytes that are held, on the way, or wait for a thread.
    """

    def __init__(self, extents: Iterable[tuple[Session, Url, int, int]], window: int = WINDOW) -> None:
        self._window = window
        self._coming = _requests(Extent(*extent) for extent in extents)
        self._active: deque[_RangeRequest] = deque()
        self._held = 0
        self._lock = threading.Lock()
        self._process = os.getpid()

    def read_into(self, url: Url, view: memoryview, at: int) -> int:
        """Read bytes that were announced; return how many, or 0 if these were not.

        Raises:
            CheckpointError: They cannot be read.
        """
        if os.getpid() != self._process:  # a fork: only the parent has the threads that answer
            return 0
        with self._lock:
            self._fill()
            request = next((one for one in self._active if one.extent.url == url and _holds(one.extent, at)), None)
            if request is None:
                self._forget_oldest()
                return 0
            for other in [*self._active]:
                if other is request:
                    break
                if other.extent.url == url:  # what comes before it in its file is done with
                    self._drop(other)
            request.used = True
            data = memoryview(request.answer.result())
            begin = request.extent.begin
            count = min(len(view), len(data) - (at - begin))
            view[:count] = data[at - begin : at - begin + count]
            if at + count == request.extent.end:
                self._drop(request)
                self._fill()
            return count

    def stop(self) -> None:
        """Ask for nothing more."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._coming = iter(())
            for request in self._active:
                request.answer.cancel()
            self._active.clear()
            self._held = 0

    def _fill(self) -> None:
        while self._held < self._window and (extent := next(self._coming, None)) is not None:
            self._active.append(_RangeRequest(extent))
            self._held += extent.end - extent.begin

    def _drop(self, request: _RangeRequest) -> None:
        self._active.remove(request)
        self._held -= request.extent.end - request.extent.begin

    def _forget_oldest(self) -> None:
        oldest = next((one for one in self._active if not one.used), None)
        if oldest is not None and self._held >= self._window:  # or the wrong ones would stay until the end
            self._drop(oldest)


def _holds(extent: Extent, at: int) -> bool:
    return extent.begin <= at < extent.end


def _requests(extents: Iterable[Extent]) -> Iterator[Extent]:
    """Cut long extents into requests, and join short ones that are near each other."""
    held: Extent | None = None
    for extent in extents:
        if extent.end <= extent.begin:
            continue
        if held is not None:
            near = (held.session, held.url) == extent[:2] and 0 <= extent.begin - held.end <= _GAP
            if near and extent.end - held.begin <= REQUEST:
                held = held._replace(end=extent.end)
                continue
            yield held
        held = extent
        while held.end - held.begin > REQUEST:
            yield held._replace(end=held.begin + REQUEST)
            held = held._replace(begin=held.begin + REQUEST)
    if held is not None:
        yield held
