"""Simulated ranks: threads that talk through queues and run what real ranks run, and what each of them does."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mmfsdp.collective.scopes import Scope

__all__ = ["Work", "counted_reads", "run_threads"]

_work = threading.local()


@dataclass
class Work:
    """What one rank did."""

    reads: int = 0
    read_bytes: int = 0
    messages: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0  # of its thread's processor time, without waiting for other threads
    result: Any = field(default=None, repr=False)


class _Hub:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=600)
        self.values: list[Any] = [None] * size
        self.boxes: dict[tuple[int, int], queue.SimpleQueue[bytes]] = {}
        self.lock = threading.Lock()

    def box(self, origin: int, place: int) -> queue.SimpleQueue[bytes]:
        with self.lock:
            return self.boxes.setdefault((origin, place), queue.SimpleQueue())


class _ThreadChannel:
    """A `mmfsdp.collective.Channel`. Each rank's part in a reduction or a broadcast counts as one message."""

    def __init__(self, hub: _Hub, place: int) -> None:
        self._hub, self._place = hub, place

    def lowest(self, values: Sequence[int]) -> list[int]:
        hub = self._hub
        hub.values[self._place] = list(values)
        self._count(8 * len(values))
        if self._meet() == 0:  # one of them does it for all
            hub.reduced = [min(column) for column in zip(*hub.values, strict=True)]
        self._meet()
        found: list[int] = hub.reduced
        self._meet()
        return found

    def broadcast(self, item: Any, origin: int) -> Any:
        hub = self._hub
        if self._place == origin:
            hub.sent = pickle.dumps(item)
            self._count(len(hub.sent))
        self._meet()
        data = hub.sent
        self._meet()
        return item if self._place == origin else pickle.loads(data)

    def send(self, item: Any, place: int) -> None:
        data = pickle.dumps(item)
        self._count(len(data))
        self._hub.box(self._place, place).put(data)

    def receive(self, place: int) -> Any:
        return pickle.loads(self._hub.box(place, self._place).get(timeout=600))

    def _meet(self) -> int:
        """Wait for all threads; what that costs among so many is no cost of a rank."""
        began = time.thread_time()
        place = self._hub.barrier.wait()
        _work.now.seconds -= time.thread_time() - began
        return place

    def _count(self, size: int) -> None:
        work: Work = _work.now
        work.messages += 1
        work.sent_bytes += size


def run_threads(function: Callable[[Scope], Any], size: int) -> list[Work]:
    """Run ``function(scope)`` on as many threads as ranks, and return what each did."""
    hub = _Hub(size)
    found = [Work() for _ in range(size)]
    errors: list[BaseException] = []

    def run(place: int) -> None:
        _work.now = found[place]
        began = time.thread_time()
        try:
            found[place].result = function(Scope(_ThreadChannel(hub, place), size, place))
        except BaseException as error:
            errors.append(error)
            hub.barrier.abort()
        found[place].seconds += time.thread_time() - began

    threading.stack_size(512 << 10)
    threads = [threading.Thread(target=run, args=(place,)) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


@contextmanager
def counted_reads() -> Iterator[None]:
    """Count what threads read with `os.pread` and `os.preadv`, the only two that loading uses for data."""
    plain = os.pread, os.preadv

    def pread(file: int, size: int, at: int) -> bytes:
        data = plain[0](file, size, at)
        _count_read(len(data))
        return data

    def preadv(file: int, buffers: Any, at: int) -> int:
        count = plain[1](file, buffers, at)
        _count_read(count)
        return count

    os.pread, os.preadv = pread, preadv  # type: ignore[assignment]
    try:
        yield
    finally:
        os.pread, os.preadv = plain


def _count_read(size: int) -> None:
    work = getattr(_work, "now", None)
    if work is not None:
        work.reads += 1
        work.read_bytes += size
