"""The four operations by which ranks exchange messages, over a gloo group of their own.

Messages go over gloo for two reasons: waiting for a rank that writes a terabyte does not trigger the watchdog of the
group that trains, and nothing is sent to a device before the device is chosen.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mmfsdp.basics.machines import boot_id
from mmfsdp.basics.variables import seconds_of
from mmfsdp.collective.lost_ranks import is_lost
from mmfsdp.errors import LostRankError, ShardStateError

__all__ = ["Channel", "GlooChannel", "host_of", "kernel_of", "naming_lost_ranks", "wait_timeout"]

_TIMEOUT = "MMFSDP_TIMEOUT"
_HOUR = 3600.0


class Channel(Protocol):
    """How one rank exchanges messages with the others. Ranks are numbered in the order of the mesh; the first is 0."""

    def lowest(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over all ranks. Collective: every rank, with equally many values."""
        ...

    def broadcast(self, item: Any, origin: int) -> Any:
        """Return the item of the rank at ``origin``. Collective: every rank."""
        ...

    def send(self, item: Any, rank: int) -> None:
        """Send an object to one rank, which must call `receive`."""
        ...

    def receive(self, rank: int) -> Any:
        """Return the object that another rank sends to this one."""
        ...


class GlooChannel:
    """A channel over a gloo group. Its errors say what the ranks were doing, instead of gloo's own.

    Args:
        group: A gloo group. Only torch holds it, so that ``destroy_process_group()`` ends its threads: one that is
            still busy when the interpreter ends aborts the process.
        ranks: The global rank of each of them, in the order of the mesh.

    Raises:
        LostRankError: From every method, if a rank died or does not take part.
        ShardStateError: From every method, after ``destroy_process_group()``.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = weakref.ref(group), ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The gloo group."""
        group = self._group()
        if group is None:
            raise ShardStateError(
                "The process group has ended. Call torch.distributed.destroy_process_group() only when nothing more is "
                "to be trained, saved or loaded."
            )
        return group

    def lowest(self, values: Sequence[int]) -> list[int]:
        """See `Channel`. Costs one reduction of eight bytes per value."""
        reduced = torch.tensor(values, dtype=torch.int64)
        with naming_lost_ranks("the ranks agreed whether a step succeeded"):
            dist.all_reduce(reduced, dist.ReduceOp.MIN, group=self.group)
        return [int(value) for value in reduced]

    def broadcast(self, item: Any, origin: int) -> Any:
        """See `Channel`."""
        sent = [item]
        with naming_lost_ranks("one rank sent an object to all others"):
            dist.broadcast_object_list(sent, src=self._ranks[origin], group=self.group)
        return sent[0]

    def send(self, item: Any, rank: int) -> None:
        """See `Channel`."""
        with naming_lost_ranks(f"this rank sent a message to rank {self._ranks[rank]}"):
            dist.send_object_list([item], dst=self._ranks[rank], group=self.group)

    def receive(self, rank: int) -> Any:
        """See `Channel`."""
        received = [None]
        with naming_lost_ranks(f"this rank waited for a message from rank {self._ranks[rank]}"):
            dist.recv_object_list(received, src=self._ranks[rank], group=self.group)
        return received[0]


def wait_timeout() -> timedelta:
    """Return how long a rank waits for the others: one hour, or the seconds in the variable ``MMFSDP_TIMEOUT``.

    Raises:
        ConfigError: The variable is not a positive number.
    """
    return timedelta(seconds=seconds_of(_TIMEOUT, _HOUR, "Unset it to wait for one hour."))


def host_of() -> str:
    """Return the name of this host, for messages."""
    return socket.gethostname()


def kernel_of() -> str:
    """Return text that is the same for all processes of one boot of one host, which share a page cache."""
    return f"{host_of()} {boot_id() or os.getpid()}"  # if it is not known, each process counts as a host


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Replace what torch raises when a rank is gone by an error that explains it.

    Args:
        doing: What ranks were doing, as in ``"ranks met for the first time"``.

    Raises:
        LostRankError: Instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LostRankError(
            f"A rank did not answer while {doing} (this is host {host_of()!r}). It died, raised an error of its own, "
            "did not make this call, which every rank must make, or took longer than "
            f"{wait_timeout().total_seconds():.0f} s ({_TIMEOUT} sets how long ranks wait). torch says: {reason}"
        ) from error
