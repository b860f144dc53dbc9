"""When a GPU has memory again that FSDP1 frees: what was used on another stream waits for it. Pure and torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mmfsdp.rehearsal.recording.step_records import Allocation, Collective

__all__ = ["released_late"]

_AHEAD = 2
"""Gathered units that FSDP1 lets the CPU be ahead of the GPU with ``limit_all_gathers``: before it gathers another one
it waits until the GPU has passed the end of the last but one (``_FreeEventQueue`` in torch/distributed/fsdp)."""


def released_late(
    allocations: Iterable[Allocation], collectives: Iterable[Collective], phases: Sequence[tuple[str, int]]
) -> tuple[Allocation, ...]:
    """Return the allocations with those that other streams use held for as long as they wait for the GPU, with FSDP1.

    Parameters are gathered on a stream of their own and used on that of training, gradients are made there, joined on
    the one that gathers, and reduced on a third. The caching allocator hands such memory out again only when the GPU
    has come as far as the CPU was when it freed it. FSDP2 frees nothing across streams.

    Args:
        allocations: All allocations of a step.
        collectives: All collectives of the step.
        phases: Names of the step's phases, each with its first moment.
    """
    gathers = sorted(item.moment for item in collectives if item.name == "all_gather")
    last = phases[-1][1] if phases else 0

    def moved(item: Allocation) -> Allocation:
        if not item.waits or item.end is None:
            return item
        place = bisect_right(gathers, item.end) + _AHEAD - 1
        return replace(item, end=gathers[place] if place < len(gathers) else max(item.end, last))

    return tuple(map(moved, allocations))
