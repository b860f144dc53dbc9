"""Joins the checksums of what ranks wrote into one file, pairwise along a tree, so that no rank does it for all."""

from __future__ import annotations

from collections.abc import Iterable

from mmfsdp.checkpoint.integrity import crc32_combine
from mmfsdp.collective.scopes import Scope

__all__ = ["Stretch", "WrittenParts", "joined_on_first"]

Stretch = tuple[int, int, int]
"""Offset in the file, length, and CRC-32 of bytes that were written."""

WrittenParts = dict[str, list[Stretch]]
"""The written parts of each tensor; tensors without any are absent."""


def joined_on_first(own: WrittenParts, scope: Scope) -> WrittenParts | None:
    """Return what all ranks wrote on the first rank, and None on the others. Collective: every rank of the scope.

    Every other rank sends one message. Rows that follow each other become one stretch on the way. So each rank receives
    at most log2(ranks) messages, whose size depends on the number of tensors and not on that of ranks.
    """
    joined, step = own, 1
    while step < scope.size:
        if scope.place % (2 * step):
            scope.channel.send(joined, scope.place - step)
            return None
        if scope.place + step < scope.size:
            joined = _merged(joined, scope.channel.receive(scope.place + step))
        step *= 2
    return joined


def _merged(one: WrittenParts, two: WrittenParts) -> WrittenParts:
    return {name: _adjoining([*one.get(name, ()), *two.get(name, ())]) for name in {**one, **two}}


def _adjoining(stretches: Iterable[Stretch]) -> list[Stretch]:
    found: list[Stretch] = []
    for begin, length, crc in sorted(stretches):
        if found and sum(found[-1][:2]) == begin:
            start, before, own = found[-1]
            found[-1] = start, before + length, crc32_combine(own, crc, length)
        else:
            found.append((begin, length, crc))
    return found
