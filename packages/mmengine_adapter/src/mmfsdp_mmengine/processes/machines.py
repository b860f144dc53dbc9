"""Taking turns: what every rank does, done first by one rank, then by one of each machine, then by the rest."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mmfsdp.collective import Scope, broadcast_object, gather_to_first, on_all_ranks

__all__ = ["firsts_of_machines", "in_turns"]

T = TypeVar("T")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux only


def in_turns(step: Callable[[], T], scope: Scope) -> T:
    """Run ``step`` on the first rank, then on the first of each other machine, then on the rest. Collective.

    What the first rank leaves on a file system that all machines share is there when the others begin, and what the
    first of a machine leaves on a disk of its own is there for the others of that machine.

    Args:
        step: What to do; not collective itself.
        scope: Who takes part.

    Returns:
        What ``step`` returned on this rank.

    Raises:
        MmfsdpError: It failed on a rank; see `mmfsdp.collective.on_all_ranks`. Ranks whose turn is later do not begin.
    """
    firsts = firsts_of_machines(scope)
    mine = 0 if scope.is_first else 1 if scope.place in firsts else 2
    results = [on_all_ranks(lambda turn=turn: step() if turn == mine else None, scope) for turn in range(3)]  # type: ignore[misc]
    return results[mine]  # type: ignore[return-value]


def firsts_of_machines(scope: Scope) -> list[int]:
    """Return the lowest place of each machine's ranks. Collective: every rank of the scope."""
    machines = gather_to_first(scope, _this_machine())
    firsts = [machines.index(machine) for machine in dict.fromkeys(machines)] if machines is not None else []
    return broadcast_object(scope, firsts)


def _this_machine() -> tuple[str, str]:
    """Host name and boot id: containers of one machine differ in the name, machines of one name in the id."""
    return socket.gethostname(), _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
