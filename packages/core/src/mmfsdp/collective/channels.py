"""The four ways in which ranks talk, over a gloo group of their own: what a collective step is made of.

Messages go over gloo, so that waiting for one rank that writes a terabyte does not run into the watchdog of the group
that trains, and that nothing is sent to a device before one is chosen.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mmfsdp.collective.lost_ranks import is_lost
from mmfsdp.errors import ConfigError, LostRankError

__all__ = ["Channel", "GlooChannel", "host_of", "naming_lost_ranks", "wait_timeout"]

_TIMEOUT = "MMFSDP_TIMEOUT"
_HOUR = 3600.0


class Channel(Protocol):
    """How one rank talks to the others. Ranks are named by their places; the first is 0."""

    def lowest(self, values: Sequence[int]) -> list[int]:
        """Return for each place of ``values`` the lowest that any rank gave. Collective: every rank, equally many."""
        ...

    def broadcast(self, item: Any, origin: int) -> Any:
        """Return what the rank at ``origin`` gave. Collective: every rank."""
        ...

    def send(self, item: Any, place: int) -> None:
        """Send an object to one rank, which receives it."""
        ...

    def receive(self, place: int) -> Any:
        """Return the object that one rank sends to this one."""
        ...


class GlooChannel:
    """Talks over a gloo group; an error that says what ranks were doing replaces gloo's.

    Args:
        group: A gloo group.
        ranks: Global ranks by place.

    Raises:
        LostRankError: By all methods: a rank died, or does not take part.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group, self._ranks = group, ranks

    def lowest(self, values: Sequence[int]) -> list[int]:
        """See `Channel`. One reduction, of eight bytes a value."""
        reduced = torch.tensor(values, dtype=torch.int64)
        with naming_lost_ranks("ranks agreed that a step was done"):
            dist.all_reduce(reduced, dist.ReduceOp.MIN, group=self.group)
        return [int(value) for value in reduced]

    def broadcast(self, item: Any, origin: int) -> Any:
        """See `Channel`."""
        sent = [item]
        with naming_lost_ranks("one rank told the others something"):
            dist.broadcast_object_list(sent, src=self._ranks[origin], group=self.group)
        return sent[0]

    def send(self, item: Any, place: int) -> None:
        """See `Channel`."""
        with naming_lost_ranks(f"a message was sent to rank {self._ranks[place]}"):
            dist.send_object_list([item], dst=self._ranks[place], group=self.group)

    def receive(self, place: int) -> Any:
        """See `Channel`."""
        received = [None]
        with naming_lost_ranks(f"a message of rank {self._ranks[place]} was waited for"):
            dist.recv_object_list(received, src=self._ranks[place], group=self.group)
        return received[0]


def wait_timeout() -> timedelta:
    """Return how long a rank waits for another one: an hour, or the seconds in the variable ``MMFSDP_TIMEOUT``.

    Raises:
        ConfigError: The variable is not a positive number.
    """
    given = os.environ.get(_TIMEOUT, "")
    try:
        seconds = float(given or _HOUR)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{_TIMEOUT} is {given!r}, not a number of seconds above 0. Unset it to wait for an hour.")
    return timedelta(seconds=seconds)


def host_of() -> str:
    """Return the name of this rank's host, for messages."""
    return socket.gethostname()


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Let what torch raises when a rank is gone say what that means.

    Args:
        doing: What ranks were doing, as in ``"ranks met for the first time"``.

    Raises:
        LostRankError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LostRankError(
            f"A rank did not answer while {doing}, on host {host_of()!r}. It died or was killed, raised an error that "
            "only it has, did not make this call, which every rank must make, or needed longer than "
            f"{wait_timeout().total_seconds():.0f} s ({_TIMEOUT} sets how long ranks wait). torch says: {reason}"
        ) from error
