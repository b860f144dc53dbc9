"""Tells all ranks at the same step what some rank knows: minutes that have passed, a save that runs, a signal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mmfsdp.collective.channels import GlooChannel, naming_lost_ranks
from mmfsdp.collective.scopes import Scope

__all__ = ["Notice", "StepMessages"]

_SLOW = 1.0  # seconds; after steps that take longer, ranks wait for the message: a step later may be too late
_OFTEN = 0.25  # seconds; between faster steps messages come no more often
_FEWEST = 100  # steps between two messages at most


@dataclass(frozen=True)
class Notice:
    """What a rank knows, or of all ranks the most that any one knows."""

    due: bool = False
    """Whether it is time to save."""
    running: bool = False
    """Whether a save is running."""
    stop: bool = False
    """Whether a rank was asked to stop."""
    sender: int = 0
    """The first rank that was."""


class StepMessages:
    """Exchanges a notice every few steps; all ranks read it at the same step. Each method is collective.

    Args:
        scope: The ranks, with a group that no other messages use.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._sent: tuple[dist.Work, torch.Tensor] | None = None
        self._pace = 1  # steps between two messages; 0 if each is waited for
        self._pause = 0  # steps until the next one
        self._ended = time.monotonic()  # the step before
        self._took = 0.0  # seconds, the newest step

    def read(self, own: Callable[[], Notice]) -> Notice | None:
        """Return what ranks have sent since the last call, or ``None``; call it when a step is done.

        Args:
            own: Returns what this rank knows; called where the message of this very step is waited for.
        """
        self._took = time.monotonic() - self._ended
        if self._sent is None and self._pace == 0:
            self._send(own())
        return self.receive()

    def send(self, own: Callable[[], Notice]) -> None:
        """Send what this rank knows, if it is time to; call it last in a step."""
        if self._sent is None and self._pace:
            if self._pause == 0:
                self._send(own())
            else:
                self._pause -= 1
        self._ended = time.monotonic()

    def receive(self) -> Notice | None:
        """Return the message that is under way, or ``None``."""
        if self._sent is None:
            return None
        (work, values), self._sent = self._sent, None
        with naming_lost_ranks("ranks agreed at a step whether to save or stop"):
            work.wait()
        due, running, stop, pace = values.tolist()
        self._pace = -pace
        self._pause = max(self._pace - 1, 0)
        return Notice(bool(due), bool(running), bool(stop), self._scope.size - stop)

    def _send(self, own: Notice) -> None:
        pace = 0 if self._took > _SLOW else min(max(int(_OFTEN / max(self._took, 1e-9)), 1), _FEWEST)
        stop = own.stop * (self._scope.size - self._scope.rank)  # the first rank has the greatest
        values = torch.tensor([own.due, own.running, stop, -pace], dtype=torch.int64)
        channel = self._scope.channel
        assert isinstance(channel, GlooChannel)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=channel.group, async_op=True)
        self._sent = work, values
