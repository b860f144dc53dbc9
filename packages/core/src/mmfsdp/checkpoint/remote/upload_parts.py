"""Cuts a file that is written in any order into parts, and hands on each part as soon as it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["UploadParts"]

_AT_ONCE = 3  # parts under way at the same time


class UploadParts:
    """The parts of a file; it offers what a `Copier` writes to.

    Bytes may come in any order. A part is handed on when all that will be written to it is there; until then it is
    held, so what lies in front of a tensor may come after it.

    Args:
        take: Called with the number of a part, from 0, and its bytes, by several threads at once; `finish` returns
            what it returns.
        size: Length of the file in bytes.
        part: Bytes of a part; the last one may be shorter, and an empty file has an empty one.
        stretches: Offset and length of everything that will be written; the rest is zeros.
    """

    def __init__(
        self, take: Callable[[int, bytes], str], size: int, part: int, stretches: Iterable[tuple[int, int]]
    ) -> None:
        self._take, self._size, self._part = take, size, part
        self._left = [0] * max(1, -(-size // part))  # bytes that are still to come, by part
        for at, length in stretches:
            self._count(at, length)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mmfsdp-upload")
        self._free = threading.Semaphore(_AT_ONCE)
        self._taken: dict[int, Future[str]] = {}
        self._held: dict[int, bytearray] = {}
        self._number, self._data = -1, bytearray()
        self._at = 0

    def _count(self, at: int, length: int) -> None:
        while length > 0:
            number = at // self._part
            here = min(length, (number + 1) * self._part - at)
            self._left[number] += here
            at, length = at + here, length - here

    def room(self, at: int, most: int) -> memoryview:
        """Return memory for up to ``most`` bytes at byte ``at`` of the file; see `BlockWriter.room`."""
        number = at // self._part
        if number != self._number:
            self._flush()
            self._number = number
            self._data = self._begun(number)
        self._at = at - number * self._part
        return memoryview(self._data)[self._at : self._at + most]

    def filled(self, count: int) -> None:
        """Note that the first bytes of the ``room`` are there."""
        self._left[self._number] -= count

    def finish(self) -> list[str]:
        """Hand on what is left, wait for it, and return what was made of each part."""
        self._flush()
        for number in range(len(self._left)):
            if number not in self._taken:  # all zeros
                self._hand_on(number, self._begun(number))
        results = [self._taken[number].result() for number in range(len(self._left))]
        self._pool.shutdown()
        return results

    def stop(self) -> None:
        """Hand on nothing more, and wait for what is under way."""
        self._pool.shutdown(cancel_futures=True)

    def _begun(self, number: int) -> bytearray:
        """Return what is there of a part."""
        if number in self._held:
            return self._held.pop(number)
        return bytearray(min(self._part, self._size - number * self._part))

    def _flush(self) -> None:
        if self._number < 0:
            return
        if self._left[self._number]:
            self._held[self._number] = self._data
        else:
            self._hand_on(self._number, self._data)
        self._number = -1

    def _hand_on(self, number: int, data: bytearray) -> None:
        for taken in self._taken.values():
            if taken.done():
                taken.result()  # an error ends the work now, and not with the last part
        self._free.acquire()
        self._taken[number] = self._pool.submit(self._complete, number, data)

    def _complete(self, number: int, data: bytearray) -> str:
        try:
            return self._take(number, bytes(data))
        finally:
            self._free.release()
