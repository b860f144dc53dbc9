"""How long a server is waited for: it must keep sending, so that one that sends a byte a second is not heard out."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from mmfsdp.basics.variables import seconds_of
from mmfsdp.checkpoint.remote.transports import PassingError

__all__ = ["LEAST", "PacedStream", "Pacer", "call_within", "patience"]

T = TypeVar("T")

_VARIABLE = "MMFSDP_REMOTE_TIMEOUT"

LEAST = 1 << 15
"""Bytes that a server must send within the time that it is waited for."""

_RATE = 1 << 16  # bytes per second that a store must at least send, of what a call asks for


def patience() -> float:
    """Return how long a server is waited for: 30 seconds, or those in the variable ``MMFSDP_REMOTE_TIMEOUT``.

    Raises:
        ConfigError: The variable is not a positive number.
    """
    return seconds_of(_VARIABLE, 30.0, "Unset it to wait for 30 seconds.")


class Pacer:
    """A clock that runs out once; after `restart`, it begins anew with every ``LEAST`` bytes."""

    def __init__(self) -> None:
        self._patience = patience()
        self._until = time.monotonic() + self._patience
        self._counts = False
        self._came = 0

    def restart(self) -> None:
        """Begin anew, and with every ``LEAST`` bytes from now on."""
        self._counts, self._came = True, 0
        self._until = time.monotonic() + self._patience

    def count(self, came: int) -> None:
        """Note that bytes came."""
        self._came += came
        if self._counts and self._came >= LEAST:
            self.restart()

    def left(self) -> float:
        """Return how many seconds are left, at least a few milliseconds.

        Raises:
            PassingError: None is.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def error(self) -> PassingError:
        """Return the error for a server that took too long."""
        what = f"sends less than {LEAST >> 10} KiB" if self._counts else "does not answer"
        return PassingError(f"its server {what} within {self._patience:g} s ({_VARIABLE} sets this time)")


def call_within(call: Callable[[], T], size: int = 0) -> T:
    """Call a driver that may wait without end, and give up after `patience` and a second for each 64 KiB.

    The call runs in a thread of its own, which a driver that never returns keeps until the process ends.

    Args:
        call: What to call.
        size: Bytes that it asks for.

    Returns:
        What it returned. Its errors are raised here.

    Raises:
        PassingError: It took longer.
    """
    seconds = patience() + size / _RATE
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="mmfsdp-store", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # a time-out of the driver's own
            raise
        raise PassingError(f"its store does not answer within {seconds:.3g} s ({_VARIABLE} sets this time)") from None


class PacedStream(io.RawIOBase):
    """The bytes that arrive at a socket, as long as they keep coming.

    Args:
        raw: The stream of the socket, which is closed with this.
        connection: The socket.
        pacer: The clock.
    """

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, pacer: Pacer) -> None:
        self._raw, self._connection, self._pacer = raw, connection, pacer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int | None:
        self._connection.settimeout(self._pacer.left())
        try:
            count = self._raw.readinto(buffer)  # type: ignore[arg-type]
        except TimeoutError as error:
            raise self._pacer.error() from error
        self._pacer.count(count or 0)
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._raw.close()
