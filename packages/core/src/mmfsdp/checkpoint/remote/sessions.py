"""The files on a server while a checkpoint is in use, and the threads that read them, with retries."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from mmfsdp.checkpoint.remote.transports import DeniedError, Info, PassingError, Transport
from mmfsdp.checkpoint.remote.urls import WEB, Url
from mmfsdp.errors import CheckpointError

__all__ = ["Session", "copied"]

_ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds; five attempts take about four seconds, and what they wait for
_THREADS = 16
_KEPT = 32 << 20  # bytes of beginnings, and of what surrounds the data of tensors, that are kept

T = TypeVar("T")


class Session:
    """The state of some files on a server, as it was when each was first looked at.

    Args:
        transport: How they are read.
    """

    def __init__(self, transport: Transport) -> None:
        self._opened: Transport | None = transport
        self._origin: Url | None = None
        _sessions.add(self)
        self._infos: dict[Url, Info | None] = {}
        self._names: dict[Url, list[str]] = {}
        self._kept: OrderedDict[Url, list[tuple[int, bytes]]] = OrderedDict()
        self._held = 0
        self._read: set[Url] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, url: Url) -> Session:
        """Return a new session for a URL and all others of the same scheme.

        Raises:
            ConfigError: The driver for its scheme is not installed.
        """
        session = cls(_transport(url))
        session._origin = url
        return session

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process sees the files as this one saw them first, and notices if they have changed.
        return _restored, (self._origin, dict(self._infos))

    @property
    def _transport(self) -> Transport:
        if self._opened is None:  # in a forked process
            assert self._origin is not None
            self._opened = _transport(self._origin)
        return self._opened

    def info(self, url: Url) -> Info | None:
        """Return what the server says of a file or directory; ``None`` if there is neither.

        Raises:
            CheckpointError: The server does not answer, or does not allow it.
        """
        denied: DeniedError | None = None
        try:
            found = self.file_info(url)
        except DeniedError as error:  # some servers say so of what does not exist, such as a directory
            found, denied = None, error
        if found is None and self.names(url):
            return Info(0, "", directory=True)
        if denied is not None:
            raise denied
        return found

    def file_info(self, url: Url) -> Info | None:
        """Return what the server says of a file; ``None`` if there is none. Errors as for `info`."""
        if url not in self._infos:
            found = _retried(url, lambda: self._transport.first(url))
            self._infos[url] = None if found is None else found[0]
            if found is not None:
                self.keep(url, 0, found[1])
        return self._infos[url]

    def file(self, url: Url) -> Info:
        """Return what the server says of a file.

        Raises:
            FileNotFoundError: There is no such file.
            CheckpointError: It cannot be read.
        """
        info = self.file_info(url)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(url))
        return info

    def names(self, url: Url) -> list[str]:
        """Return the sorted names of what lies in a directory, as they were when they were first asked for."""
        if url not in self._names:
            self._names[url] = sorted(_retried(url, lambda: self._transport.names(url)))
        return self._names[url]

    def held(self, url: Url, view: memoryview, at: int) -> int:
        """Copy bytes of a file that are at hand; return how many."""
        kept = self._kept.get(url, ())
        with self._lock:
            found = bisect_right(kept, at, key=lambda block: block[0]) - 1
            return copied(view, at, *kept[found]) if found >= 0 else 0

    def keep(self, url: Url, begin: int, data: bytes) -> None:
        """Keep bytes of a file at hand, and let go of others if there are too many."""
        with self._lock:
            insort(self._kept.setdefault(url, []), (begin, data), key=lambda block: block[0])
            self._kept.move_to_end(url)
            self._held += len(data)
            while self._held > _KEPT and len(self._kept) > 1:
                _, blocks = self._kept.popitem(last=False)
                self._held -= sum(len(block) for _, block in blocks)
            if self._held > _KEPT:
                self._kept[url] = [(begin, data)]
                self._held = len(data)

    def read(self, url: Url, begin: int, end: int) -> bytearray:
        """Return bytes of a file.

        Raises:
            CorruptCheckpointError: The file has changed since it was first looked at.
            CheckpointError: The server does not answer, or stops before the end, several times.
        """
        info = self.file(url)
        data = bytearray(end - begin)
        view = memoryview(data)
        done = 0

        def rest() -> None:
            nonlocal done
            while done < len(view):
                before = done
                done += self._transport.fill(url, view[done:], begin + done, info)
                if done < len(view):
                    early = f"stopped {len(view) - done} bytes early"
                    raise PassingError(f"the server {early if done > before else 'sent nothing'}")

        _retried(url, rest)
        self._read.add(url)
        return data

    def submit(self, url: Url, begin: int, end: int) -> Future[bytearray]:
        """Read bytes of a file in another thread; see `read`."""
        answer: Future[bytearray] = Future()
        _pool().put((answer, lambda: self.read(url, begin, end)))
        return answer

    def check_unchanged(self, url: Url) -> None:
        """Raise if a file that was read has changed, as far as that was not seen while it was read.

        Raises:
            CorruptCheckpointError: It has changed.
        """
        info = self._infos.get(url)
        if url in self._read and info is not None:
            self._read.discard(url)
            _retried(url, lambda: self._transport.check(url, info))


_sessions: WeakSet[Session] = WeakSet()


def _begin_in_child() -> None:
    """Give a forked process threads, connections and locks of its own: its parent's answer the parent only."""
    _pool.cache_clear()
    for session in _sessions:
        session._lock = threading.Lock()
        if session._origin is not None:
            session._opened = None


os.register_at_fork(after_in_child=_begin_in_child)


def _restored(origin: Url, infos: dict[Url, Info | None]) -> Session:
    session = Session.of(origin)
    session._infos |= infos
    return session


def copied(view: memoryview, at: int, begin: int, data: bytes) -> int:
    """Copy what a block that begins at ``begin`` holds from ``at`` on; return how many bytes."""
    count = max(0, min(len(view), begin + len(data) - at)) if at >= begin else 0
    view[:count] = data[at - begin : at - begin + count]
    return count


def _transport(url: Url) -> Transport:
    if url.scheme in WEB:
        from mmfsdp.checkpoint.remote import over_http

        return over_http.transport(url)
    from mmfsdp.checkpoint.remote import over_fsspec

    return over_fsspec.transport(url)


def _retried(url: Url, call: Callable[[], T]) -> T:
    """Call something that may fail in passing, up to five times.

    Raises:
        CheckpointError: It failed each time.
    """
    pause = _FIRST_PAUSE
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except PassingError as error:
            if attempt == _ATTEMPTS:
                raise CheckpointError(
                    f"{url.name} cannot be read: {error.reason}, in {_ATTEMPTS} attempts. Try again later, or copy the "
                    "checkpoint to this machine by another way.",
                    file=str(url),
                ) from error
            # Clients that failed together do not come again together.
            time.sleep(min(max(error.pause, pause * random.uniform(0.5, 1.0)), _LONGEST_PAUSE))
            pause *= 2
    raise AssertionError("unreachable")


_Task = tuple["Future[bytearray]", Callable[[], bytearray]]


@cache
def _pool() -> SimpleQueue[_Task]:
    """Return the queue of the threads that read; they do not keep the process from ending."""
    tasks: SimpleQueue[_Task] = SimpleQueue()
    for number in range(_THREADS):
        threading.Thread(target=_work, args=(tasks,), name=f"mmfsdp-remote-{number}", daemon=True).start()
    return tasks


def _work(tasks: SimpleQueue[_Task]) -> Any:
    while True:
        answer, call = tasks.get()
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)
        del answer, call  # what was read must not stay until the next task comes
