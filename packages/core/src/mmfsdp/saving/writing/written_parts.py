"""Joins the checksums of what ranks wrote into one file, pairwise along a tree, so that no rank does it for all."""

from __future__ import annotations

from collections.abc import Iterable

from mmfsdp.checkpoint.files.planned_files import Stretch
from mmfsdp.checkpoint.integrity import crc32_combine
from mmfsdp.collective.scopes import Scope

__all__ = ["SCATTERED", "WrittenParts", "joined_on_first"]

SCATTERED = -1
"""Offset that stands for many, if a rank wrote a tensor in so many stretches that it tells only their length."""

WrittenParts = dict[str, list[Stretch]]
"""The written parts of each tensor; tensors without any are absent."""


def joined_on_first(own: WrittenParts, scope: Scope, border: int = 0) -> WrittenParts | None:
    """Return what all ranks wrote on the first rank, and None on the others. Collective: every rank of the scope.

    Every other rank sends one message. Rows that follow each other become one stretch on the way. So each rank receives
    at most log2(ranks) messages, whose size depends on the number of tensors and not on that of ranks.

    Args:
        own: What this rank wrote.
        scope: The ranks.
        border: Stretches stay apart at multiples of so many bytes of the file, if it is not 0: then the messages grow
            with the file.
    """
    joined, step = own, 1
    while step < scope.size:
        if scope.rank % (2 * step):
            scope.channel.send(joined, scope.rank - step)
            return None
        if scope.rank + step < scope.size:
            joined = _merged(joined, scope.channel.receive(scope.rank + step), border)
        step *= 2
    return joined


def _merged(one: WrittenParts, two: WrittenParts, border: int) -> WrittenParts:
    return {name: _adjoining([*one.get(name, ()), *two.get(name, ())], border) for name in {**one, **two}}


def _adjoining(stretches: Iterable[Stretch], border: int) -> list[Stretch]:
    found: list[Stretch] = []
    for begin, length, crc in sorted(stretches):
        start, before, own = found[-1] if found else (0, 0, 0)
        if found and SCATTERED == start == begin:
            found[-1] = start, before + length, 0
        elif found and start != SCATTERED and start + before == begin and not (border and begin % border == 0):
            found[-1] = start, before + length, crc32_combine(own, crc, length)
        else:
            found.append((begin, length, crc))
    return found
