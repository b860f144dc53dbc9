"""Replays the allocations of a step through the caching allocator, several times. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmfsdp.rehearsal.allocator.caching import Block, CachingAllocator
from mmfsdp.rehearsal.allocator.wrapping import Wrapped
from mmfsdp.rehearsal.recording.step_records import Allocation

__all__ = ["Replayed", "replayed"]

_IN_FLIGHT = 2  # buckets of a broadcast

_Event = tuple[int, bool, int]
"""A moment, whether something is allocated rather than released, and its index."""


@dataclass(frozen=True)
class Replayed:
    """What the allocator did in a number of equal steps."""

    reserved: int
    """The most bytes that it had of the device at a time."""
    allocated: int
    """The most bytes that it handed out at a time."""
    retries: int
    """How often it gave free segments back in the last step."""
    returned: int
    """Bytes that it gave back in the last step; it took most of them again."""


def replayed(
    allocations: Iterable[Allocation],
    *,
    expandable: bool = False,
    workspaces: Iterable[int] = (),
    state_from: int | None = None,
    limit: float = math.inf,
    steps: int = 2,
    late: Sequence[Allocation] | None = None,
    wrapped: Iterable[Wrapped] = (),
) -> Replayed:
    """Replay a step: what is there before it is allocated first, in its order; then the step runs several times.

    The first step leaves segments behind that the second one finds.

    Args:
        allocations: All allocations of a step.
        expandable: Use expandable segments.
        workspaces: Bytes of blocks that kernels keep from the first step on.
        state_from: The moment of the first step at which the optimizer's state is made, in the segments that
            activations leave; None if it is there before the step, as after loading a checkpoint.
        limit: Bytes that the device has for the allocator, without expandable segments.
        steps: How often the step runs.
        late: The same allocations with later ends, if what is freed waits for the device, see
            `mmfsdp.rehearsal.allocator.waiting`.
        wrapped: What wrapping allocates, in place of the parameters that are there before the step.

    Raises:
        DeviceFullError: The limit is too low.
    """
    units = tuple(wrapped)

    def own(found: Iterable[Allocation]) -> list[Allocation]:
        return [item for item in found if item.begin or not units or item.kind != "parameter"]

    items = own(allocations)
    held = [index for index, item in enumerate(items) if not item.begin]
    made = {index for index in held if state_from is not None and items[index].kind == "optimizer state"}
    events = [(item.begin, True, index) for index, item in enumerate(items) if item.begin]
    events += [
        (item.end, False, index) for index, item in enumerate(own(late) if late else items) if item.end is not None
    ]
    replay = _Replay(items, expandable, limit)
    for unit in units:
        replay.wrap(unit)
    for index in held:
        if index not in made:
            replay.allocate(index)
    for nbytes in workspaces:
        replay.allocator.allocate(nbytes)
    replay.run([*events, *((state_from or 0, True, index) for index in made)])
    for _ in range(steps - 1):
        replay.run(events)
    most = max(replay.most, replay.allocator.allocated)
    return Replayed(replay.allocator.most, most, *replay.counted)


class _Replay:
    """The allocator and the blocks in use."""

    def __init__(self, items: Sequence[Allocation], expandable: bool, limit: float) -> None:
        self.allocator = CachingAllocator(expandable=expandable, limit=limit, finish=self._finish)
        self.most, self.counted = 0, (0, 0)
        self._items, self._live, self._now = items, dict[int, Block](), 0

    def allocate(self, index: int) -> None:
        item = self._items[index]
        self._live[index] = self.allocator.allocate(item.nbytes, item.stream)
        self.most = max(self.most, self.allocator.allocated)

    def wrap(self, unit: Wrapped) -> None:
        """Allocate what wrapping a unit allocates, and keep the shard."""
        params = [self.allocator.allocate(size) for size in unit.params]
        sent: list[Block] = []
        for size in unit.sent:
            if len(sent) == _IN_FLIGHT:
                self.allocator.release(sent.pop(0))
            sent.append(self.allocator.allocate(size))
        for block in sent:
            self.allocator.release(block)
        flat = self.allocator.allocate(unit.flat)
        for block in params:
            self.allocator.release(block)
        if unit.shard < unit.flat:
            self.allocator.allocate(unit.shard)
            self.allocator.release(flat)

    def run(self, events: Sequence[_Event]) -> None:
        """Run a step, then release what it made and allocate what it freed, for the next one."""
        retries, returned = self.allocator.retries, self.allocator.returned
        for self._now, begins, index in sorted(events):
            if begins:
                self.allocate(index)
            else:
                self._release(index)
        for index in [*self._live]:
            if self._items[index].begin:
                self._release(index)
        for index, item in enumerate(self._items):
            if not item.begin and index not in self._live:
                self.allocate(index)
        self.counted = self.allocator.retries - retries, self.allocator.returned - returned

    def _release(self, index: int) -> None:
        if index in self._live:
            self.allocator.release(self._live.pop(index))

    def _finish(self) -> None:
        """Release what waits for the device."""
        for index in [*self._live]:
            item = self._items[index]
            if item.begin and item.end is not None and item.end <= self._now:
                self._release(index)
