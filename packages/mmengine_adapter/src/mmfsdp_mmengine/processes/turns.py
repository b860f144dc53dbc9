"""Runs a step in turns: first one rank, then one rank of each other machine, then all other ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from mmfsdp.basics import boot_id
from mmfsdp.collective import Scope, broadcast_object, gather_to_first, on_all_ranks

__all__ = ["firsts_of_machines", "in_turns"]

T = TypeVar("T")


def in_turns(step: Callable[[], T], scope: Scope) -> T:
    """Run ``step`` on the first rank, then on the first of each other machine, then on the rest. Collective.

    Files that the first rank leaves on a shared file system exist when the other ranks begin, and files that a
    machine's first rank leaves on a local disk exist for the other ranks of that machine.

    Args:
        step: The function to run; not collective itself.
        scope: The ranks that take part.

    Returns:
        The result of ``step`` on this rank.

    Raises:
        MmfsdpError: The step failed on a rank; see `mmfsdp.collective.on_all_ranks`. Later turns do not begin.
    """
    firsts = firsts_of_machines(scope)
    mine = 0 if scope.is_first else 1 if scope.rank in firsts else 2
    results = [on_all_ranks(lambda turn=turn: step() if turn == mine else None, scope) for turn in range(3)]  # type: ignore[misc]
    return results[mine]  # type: ignore[return-value]


def firsts_of_machines(scope: Scope) -> list[int]:
    """Return the lowest rank of each machine's ranks. Collective: every rank of the scope."""
    machines = gather_to_first(scope, _this_machine())
    firsts = [machines.index(machine) for machine in dict.fromkeys(machines)] if machines is not None else []
    return broadcast_object(scope, firsts)


def _this_machine() -> tuple[str, str | None]:
    """Return host name and boot id: containers share the id of their machine, and machines may share a name."""
    return socket.gethostname(), boot_id()
