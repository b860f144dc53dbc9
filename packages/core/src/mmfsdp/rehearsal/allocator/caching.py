"""A model of torch's caching allocator: how much memory it takes from the device.

Rules of the CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp), without ``max_split_size``: sizes are rounded
up to 512 bytes; up to 1 MiB they are cut from segments of 2 MiB, below 10 MiB from segments of 20 MiB, and above they
get a segment of their own, rounded up to 2 MiB. The smallest free block of the same stream that is large enough is
used, and split if the rest is worth it; free neighbours are joined. Segments stay until the device has no more memory:
then all that are wholly free are given back, and the device is asked again. With expandable segments there is one
segment per stream and pool, which grows by pages of 2 or 20 MiB.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

__all__ = ["Block", "CachingAllocator", "DeviceFullError"]

_MIB = 1 << 20
_SMALLEST = 512
_SMALL = _MIB  # the largest size of the small pool
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB  # the smallest size that gets a segment of its own

_Pool = tuple[Hashable, bool]
"""A stream, and whether the pool holds small blocks."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    pool: _Pool
    address: int
    size: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True)
class _Free:
    """The free blocks of a pool, ordered by size, then address."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]

    def smallest(self, size: int) -> Block | None:
        index = bisect_left(self.keys, (size, 0))
        return self.blocks[self.keys[index][1]] if index < len(self.keys) else None


class DeviceFullError(MemoryError):
    """The device has no room for an allocation, although all that is free was given back."""


class CachingAllocator:
    """The state of the allocator.

    Args:
        expandable: Use expandable segments.
        limit: Bytes that the device has for it, without expandable segments.
        finish: Called when the device has no more memory, before free segments are given back. Torch waits for the
            device at this point, so blocks that wait for it can be released.

    Attributes:
        reserved: Bytes of all segments.
        most: The most that these have been.
        allocated: Bytes of all blocks in use, rounded as the allocator rounds them.
        retries: How often free segments were given back because the device had no more memory; torch counts these as
            ``num_alloc_retries``.
        returned: Bytes that were given back.
    """

    def __init__(
        self, *, expandable: bool = False, limit: float = math.inf, finish: Callable[[], None] | None = None
    ) -> None:
        self.reserved = self.most = self.allocated = self.retries = self.returned = 0
        self._limit, self._finish = limit, finish
        self._expandable = expandable
        self._free: dict[_Pool, _Free] = {}
        self._last: dict[_Pool, Block] = {}  # of expandable segments
        self._next = 0

    def allocate(self, nbytes: int, stream: Hashable = "") -> Block:
        """Return a block of at least ``nbytes``, for `release`."""
        size = max(-(-nbytes // _SMALLEST), 1) * _SMALLEST
        pool = stream, size <= _SMALL
        free = self._free.setdefault(pool, _Free())
        block = free.smallest(size)
        if block is None:
            block = self._grown(pool, size) if self._expandable else self._segment(pool, size)
        else:
            free.remove(block)
        rest = block.size - size
        if rest >= _SMALLEST and (pool[1] or self._expandable or rest > _SMALL):
            tail = Block(pool, block.address + size, rest, True, block, block.after)
            if block.after is not None:
                block.after.before = tail
            elif self._last.get(pool) is block:
                self._last[pool] = tail
            block.size, block.after = size, tail
            free.add(tail)
        block.is_free = False
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Take back a block, and join it with free neighbours."""
        self.allocated -= block.size
        free = self._free[block.pool]
        block.is_free = True
        for first, second in ((block.before, block), (block, block.after)):
            if first is not None and second is not None and first.is_free and second.is_free:
                other = first if second is block else second
                free.remove(other)
                block.address, block.size = first.address, first.size + second.size
                block.before, block.after = first.before, second.after
                if block.before is not None:
                    block.before.after = block
                if block.after is not None:
                    block.after.before = block
                if self._last.get(block.pool) is other:
                    self._last[block.pool] = block
        free.add(block)

    def _segment(self, pool: _Pool, size: int) -> Block:
        if pool[1]:
            taken = _SMALL_SEGMENT
        else:
            taken = _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        return self._taken(pool, taken)

    def _grown(self, pool: _Pool, size: int) -> Block:
        page = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        last = self._last.get(pool)
        if last is not None and last.is_free:
            self._free[pool].remove(last)
            more = -(-(size - last.size) // page) * page
            last.size += more
            self._add(more)
            return last
        block = self._taken(pool, -(-size // page) * page)
        if last is not None:
            block.address, block.before, last.after = last.address + last.size, last, block
        self._last[pool] = block
        return block

    def _add(self, size: int) -> None:
        self.reserved += size
        self.most = max(self.most, self.reserved)

    def _give_back(self) -> None:
        """Give free segments back to the device: blocks without neighbours."""
        self.retries += 1
        if self._finish is not None:
            self._finish()
        for free in self._free.values():
            for block in [*free.blocks.values()]:
                if block.before is None and block.after is None:
                    free.remove(block)
                    self.reserved -= block.size
                    self.returned += block.size

    def _taken(self, pool: _Pool, size: int) -> Block:
        if self.reserved + size > self._limit:
            self._give_back()
            if self.reserved + size > self._limit:
                raise DeviceFullError
        self._add(size)
        self._next += 1 << 50  # segments have no neighbours
        return Block(pool, self._next, size)
