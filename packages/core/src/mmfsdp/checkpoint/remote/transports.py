"""A way to read files of servers, whatever the protocol, and the errors that it raises."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from mmfsdp.checkpoint.damage import changed_while_read
from mmfsdp.checkpoint.remote.urls import Url
from mmfsdp.errors import CheckpointError, CorruptCheckpointError

__all__ = ["HEAD", "DeniedError", "Info", "PassingError", "Transport", "changed"]

HEAD = 1 << 18
"""Bytes at the beginning of a file that are read at once: nearly every header fits."""


class Info(NamedTuple):
    """A server's answer about a file or a directory."""

    size: int
    """Its length in bytes; 0 for a directory."""
    identity: str
    """The version of the file: its ETag, or the time of its last change. Empty if the server says neither."""
    directory: bool = False
    """Whether it is a directory."""


class DeniedError(CheckpointError):
    """A server does not let somebody read a file, or does not want to say that there is none."""


class PassingError(Exception):
    """A request failed in a way that may pass: it is made again.

    Args:
        reason: What happened, for the message when it did not pass.
        pause: Seconds that the server asks to wait.
    """

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.pause = reason, pause


class Transport(Protocol):
    """A way to read files of servers. Each method may raise `PassingError`; all may be called by many threads."""

    def first(self, url: Url) -> tuple[Info, bytes] | None:
        """Return what the server says of a file, and its first ``HEAD`` bytes; ``None`` if there is none."""

    def fill(self, url: Url, view: memoryview, at: int, info: Info) -> int:
        """Read bytes of a file; return how many came: if they are fewer than there is room for, more are asked for."""

    def names(self, url: Url) -> list[str]:
        """Return the names of the files and directories in a directory; empty if there is none."""

    def check(self, url: Url, info: Info) -> None:
        """Raise `changed` if a file is no longer the one that was described. Does nothing if ``fill`` does it."""


def changed(url: Url) -> CorruptCheckpointError:
    """Return the error for a file that is not the one that was looked at first."""
    who = "somebody replaced it on the server. Read the checkpoint again when nobody writes to it."
    return changed_while_read(url.name, who, url)
