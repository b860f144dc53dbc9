"""Simulated ranks: threads that run in turn what real ranks run, and what each of them does."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
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


class _Turns:
    """Lets one thread run at a time: what it takes is its own, and thousands do not wake each other in vain."""

    def __init__(self, places: Sequence[int]) -> None:
        self._locks = {place: threading.Lock() for place in places}
        for lock in self._locks.values():
            lock.acquire()
        self._ready = deque(places)
        self._left = len(places)
        self.over = threading.Event()
        self.failed = False

    def start(self) -> None:
        """Let the first one run."""
        self._next()

    def wait(self, place: int) -> None:
        """Wait for one's first turn."""
        self._locks[place].acquire()
        if self.failed:
            raise threading.BrokenBarrierError

    def rest(self, place: int) -> None:
        """Let others run until somebody wakes this one."""
        self._next()
        self.wait(place)

    def wake(self, place: int) -> None:
        """Let another thread run after those that may run already."""
        self._ready.append(place)

    def end(self, *, failed: bool) -> None:
        """Leave; if this one failed, all others do, too."""
        self._left -= 1
        if failed and not self.failed:
            self._fail()
        elif not self.failed and self._left:
            self._next()
        if not self._left:
            self.over.set()

    def _next(self) -> None:
        if self._ready:
            self._locks[self._ready.popleft()].release()
        else:  # each waits for another
            self._fail()

    def _fail(self) -> None:
        self.failed = True
        for lock in self._locks.values():
            if lock.locked():
                lock.release()


class _Hub:
    def __init__(self, places: Sequence[int]) -> None:
        self.turns, self.count = _Turns(places), len(places)
        self.values: dict[int, list[int]] = {}
        self.there: list[int] = []
        self.boxes: dict[tuple[int, int], deque[bytes]] = {}
        self.waiting: set[tuple[int, int]] = set()

    def meet(self, place: int, last: Callable[[], Any]) -> None:
        """Wait for all; the last to come calls ``last`` for all."""
        self.there.append(place)
        if len(self.there) < self.count:
            self.turns.rest(place)
            return
        last()
        others, self.there = self.there[:-1], []
        for other in others:
            self.turns.wake(other)


class _ThreadChannel:
    """A `mmfsdp.collective.Channel`. Each rank's part in a reduction or a broadcast counts as one message."""

    def __init__(self, hub: _Hub, place: int) -> None:
        self._hub, self._place = hub, place

    def lowest(self, values: Sequence[int]) -> list[int]:
        hub = self._hub
        hub.values[self._place] = list(values)
        self._count(8 * len(values))

        def reduce() -> None:
            hub.found = [min(column) for column in zip(*hub.values.values(), strict=True)]

        self._meet(reduce)
        found: list[int] = hub.found
        return found

    def broadcast(self, item: Any, origin: int) -> Any:
        hub = self._hub
        if self._place == origin:
            hub.sent = pickle.dumps(item)
            self._count(len(hub.sent))
        self._meet(lambda: None)
        return item if self._place == origin else pickle.loads(hub.sent)

    def send(self, item: Any, place: int) -> None:
        data = pickle.dumps(item)
        self._count(len(data))
        way = self._place, place
        self._hub.boxes.setdefault(way, deque()).append(data)
        if way in self._hub.waiting:
            self._hub.waiting.remove(way)
            self._hub.turns.wake(place)

    def receive(self, place: int) -> Any:
        way = place, self._place
        box = self._hub.boxes.setdefault(way, deque())
        if not box:
            self._hub.waiting.add(way)
            self._hub.turns.rest(self._place)
        return pickle.loads(box.popleft())

    def _meet(self, last: Callable[[], Any]) -> None:
        """Wait for all threads; what that costs among so many is no cost of a rank."""
        began = time.thread_time()
        self._hub.meet(self._place, last)
        _work.now.seconds -= time.thread_time() - began

    def _count(self, size: int) -> None:
        work: Work = _work.now
        work.messages += 1
        work.sent_bytes += size


def run_threads(function: Callable[[Scope], Any], size: int, present: Sequence[int] | None = None) -> list[Work]:
    """Run ``function(scope)`` on as many threads as ranks, one at a time, and return what each did.

    Args:
        function: What each rank does.
        size: How many ranks there are.
        present: The ranks that run, if not all do. The others would agree with them, which only reductions and
            broadcasts allow: nothing can be sent to them.
    """
    places = range(size) if present is None else present
    hub = _Hub(places)
    found = {place: Work() for place in places}
    errors: list[BaseException] = []

    def run(place: int) -> None:
        _work.now = found[place]
        failed = False
        try:
            hub.turns.wait(place)
            began = time.thread_time()
            found[place].result = function(Scope(_ThreadChannel(hub, place), size, place))
            found[place].seconds += time.thread_time() - began
        except BaseException as error:
            failed = True
            errors.append(error)
        hub.turns.end(failed=failed)

    threading.stack_size(512 << 10)
    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places]
    for thread in threads:
        thread.start()
    hub.turns.start()
    hub.turns.over.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [*found.values()]


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
