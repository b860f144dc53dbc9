"""Ends a process that a scheduler wants gone: it is asked by a signal or a call, and leaves when its run is saved."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from mmfsdp.errors import ConfigError
from mmfsdp.saving.loop.stop_signals import StopSignals

__all__ = ["Stopping"]

_log = logging.getLogger("mmfsdp.saving")


class Stopping:
    """Whether this process is to leave, and with which exit code. Not collective.

    Args:
        grace_seconds: How long it may live after a signal; ``None`` leaves signals alone.
        exit_code: Its exit code.
        kept: Says what is on disk, and what is lost. Called by another thread.
    """

    def __init__(self, grace_seconds: float | None, exit_code: int, kept: Callable[[], str]) -> None:
        self._code, self._kept = exit_code, kept
        self._signals = None if grace_seconds is None else StopSignals(grace_seconds, exit_code, kept)

    @property
    def is_on(self) -> bool:
        """Whether this process may be asked to leave."""
        return self._signals is not None

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to leave."""
        return self._signals is not None and self._signals.asked

    def ask(self) -> None:
        """Begin to leave, as if a signal had come. Any thread, and any handler, may call this.

        Raises:
            ConfigError: ``grace_seconds`` is ``None``.
        """
        if self._signals is None:
            raise ConfigError("request_stop() needs grace_seconds, the time that ranks have to save and leave.")
        self._signals.ask()

    def leave(self, sender: int, *, tells: bool) -> NoReturn:
        """Raise ``SystemExit``.

        Args:
            sender: The place of the rank that was asked.
            tells: Whether this rank writes to the log why it leaves, and what is on disk.
        """
        if tells:
            reason = f"rank {sender} was asked to"
            _log.warning("Leaving with exit code %d, as %s. %s", self._code, reason, self._kept())
        atexit.register(_end_groups)
        raise SystemExit(self._code)

    def close(self) -> None:
        """Give the signals back, unless one came: it ends the process, if nothing else does."""
        if self._signals is not None and not self._signals.asked:
            self._signals.close()
            self._signals = None


def _end_groups() -> None:
    """End gloo's threads: one that is busy when the interpreter ends makes the exit code that of SIGABRT."""
    if dist.is_initialized():
        dist.destroy_process_group()
