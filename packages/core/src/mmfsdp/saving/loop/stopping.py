"""Ends a process that a scheduler wants gone: it is asked by a signal or a call, and leaves when its run is saved."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from mmfsdp.errors import ConfigError

__all__ = ["Stopping"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LAST_WORDS = 1.0  # seconds before the end of the grace period at which a process leaves, a tenth of it at most
_log = logging.getLogger("mmfsdp.saving")


class Stopping:
    """Whether this process is to leave, and with which exit code. Not collective.

    Takes SIGTERM and SIGUSR1, where the program has no handler for them, until it is closed. Python runs handlers only
    between two instructions of the main thread, which may be minutes apart: in a collective, a compiler, a save. So a
    thread of its own reads the signals from a pipe.

    Args:
        grace_seconds: How long the process may live after the first signal; ``None`` leaves signals alone.
        exit_code: Its exit code, also if it has not left by then.
        kept: Describes the newest save on disk and the work that is lost. Called by another thread.
    """

    def __init__(self, grace_seconds: float | None, exit_code: int, kept: Callable[[], str]) -> None:
        self.is_on = grace_seconds is not None
        """Whether this process may be asked to leave."""
        self.is_asked = False
        """Whether a signal came, or `ask` was called."""
        self._grace, self._code, self._kept = grace_seconds or 0.0, exit_code, kept
        self._deadline: float | None = None
        self._taken: dict[signal.Signals, Any] = {}  # and the handlers before
        if self.is_on:
            self._take_signals()

    def _take_signals(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._former = -1
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in _SIGNALS}
            self._taken = {number: handler for number, handler in found.items() if handler in (signal.SIG_DFL, _note)}
            if self._taken:
                self._former = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            for number in self._taken:
                signal.signal(number, _note)
        else:
            _log.warning(
                "This CheckpointManager is made outside of the main thread, where Python cannot take signals. Call its "
                "request_stop() from a handler of your own."
            )
        self._thread = threading.Thread(target=self._listen, name="mmfsdp stop signals", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Begin to leave as if a signal had come, unless one has. Any thread, and any handler, may call this.

        Raises:
            ConfigError: ``grace_seconds`` is ``None``.
        """
        if not self.is_on:
            raise ConfigError("request_stop() needs grace_seconds, the time that ranks have to save and leave.")
        if not self.is_asked:
            self.is_asked = True
            self._theirs.send(bytes([0]))

    def leave(self, sender: int, *, tells: bool) -> NoReturn:
        """Raise ``SystemExit``.

        Args:
            sender: The rank that was asked.
            tells: Whether this rank writes to the log why it leaves, and what is on disk.
        """
        if tells:
            reason = f"rank {sender} was asked to"
            _log.warning("Leaving with exit code %d, as %s. %s", self._code, reason, self._kept())
        atexit.register(_end_groups)
        raise SystemExit(self._code)

    def close(self) -> None:
        """Give the signals back, unless one came: it ends the process, if nothing else does.

        In another thread than the main one, which cannot do so, they stay taken.
        """
        if not self.is_on or self.is_asked:
            return
        self.is_on = False
        if self._taken and threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._taken.items():
            if signal.getsignal(number) is _note:
                signal.signal(number, handler)
        if self._taken:
            signal.set_wakeup_fd(self._former)
        self._taken = {}
        # The thread reads the end of the stream, and returns. close() alone would not send it, as workers of data
        # loaders may have inherited the socket.
        self._theirs.shutdown(socket.SHUT_RDWR)
        self._theirs.close()
        self._thread.join()
        self._ours.close()

    def _listen(self) -> None:
        while True:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                self._end()
            self._ours.settimeout(left)
            try:
                numbers = self._ours.recv(64)
            except TimeoutError:
                continue
            if not numbers:
                return
            for number in numbers:
                if self._former != -1 and number:
                    with suppress(OSError):  # full, or closed since: this thread must go on
                        os.write(self._former, bytes([number]))  # for who had the pipe before, such as an event loop
                if number in self._taken or not number:
                    self._begin(signal.Signals(number).name if number else "A request to stop")

    def _begin(self, name: str) -> None:
        if self._deadline is None:
            self.is_asked = True
            self._deadline = time.monotonic() + self._grace - min(_LAST_WORDS, self._grace / 10)
            _log.warning("%s: this rank saves after its step, and leaves within %g s.", name, self._grace)
        else:
            _log.warning("%s, again: this rank is about to leave. %s", name, self._kept())

    def _end(self) -> None:
        """End the process; the main thread may be anywhere, and hold any lock, even the logger's."""
        text = f"mmfsdp: the step or save did not end within {self._grace:g} s of the signal. {self._kept()}\n"
        with suppress(OSError):  # nobody reads standard error any more
            os.write(2, text.encode())
        os._exit(self._code)


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: that Python has a handler is what makes it write to the pipe."""


def _end_groups() -> None:
    """End gloo's threads: one that is busy when the interpreter ends kills the process with SIGABRT."""
    if dist.is_initialized():
        dist.destroy_process_group()
