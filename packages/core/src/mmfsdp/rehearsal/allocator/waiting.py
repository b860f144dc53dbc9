"""When memory that FSDP1 frees can be used again: if another stream used it, the GPU must finish first. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mmfsdp.rehearsal.recording.step_records import Allocation

__all__ = ["released_late"]

_AHEAD = 2
"""Units that FSDP1 frees ahead of the GPU before it waits for one, with ``limit_all_gathers`` (``_FreeEventQueue`` in
torch/distributed/fsdp/_limiter_utils.py)."""


def released_late(allocations: Iterable[Allocation], phases: Sequence[tuple[str, int]]) -> tuple[Allocation, ...]:
    """Return FSDP1's allocations, with later ends for those that wait for the GPU because another stream uses them.

    FSDP1 gathers parameters on one stream and uses them on the training stream. It makes gradients there, joins them on
    the first one, and reduces them on a third. The caching allocator hands such memory out again only when the GPU has
    come as far as the CPU was when it freed it. The CPU runs ahead until FSDP1 makes it wait: before it gathers a unit,
    until the GPU has passed the oldest queued point at which a unit was freed, if there are two or more.
    FSDP2 frees nothing across streams.

    Args:
        allocations: All allocations of a step.
        phases: Names of the step's phases, each with its first moment.
    """
    items = tuple(allocations)
    passed = _passed(items, phases)
    last = phases[-1][1] if phases else 0

    def moved(item: Allocation) -> Allocation:
        if not item.waits or item.end is None:
            return item
        index = bisect_left(passed, (item.end, 0))
        return replace(item, end=passed[index][1] if index < len(passed) else max(item.end, last))

    return tuple(map(moved, items)) if passed else items


def _passed(items: Sequence[Allocation], phases: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """Return pairs in order: a moment of the step, and a later one by which the GPU has certainly passed it."""
    units = [item for item in items if item.kind == "gathered" and item.waits]
    gathered = [item for item in units if item.stream == "gathers"] or units  # nothing is sent on a single rank
    asks = sorted(item.begin for item in gathered if item.begin)
    # The whole model asks for its own parameters, which it still has, when its backward begins.
    indices = (bisect_left(asks, moment) for name, moment in phases if name == "backward")
    asks += [asks[index] for index in indices if index < len(asks)]
    frees = [item.end for item in gathered if item.end is not None]
    events = sorted([*((moment, True) for moment in asks), *((moment, False) for moment in frees)])
    queue: deque[int] = deque()
    found: list[tuple[int, int]] = []
    for step in range(2):  # the first one leaves a queue to the second
        for moment, is_asked in events:
            if not is_asked:
                queue.append(moment if step else -1)
            elif len(queue) >= _AHEAD:
                freed = queue.popleft()
                if step:
                    found.append((freed, moment))
    return sorted(item for item in found if item[0] >= 0)
