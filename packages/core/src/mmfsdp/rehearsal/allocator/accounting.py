"""Adds up allocations over time: how much is held when, of which kind, and by which modules. Pure and torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from mmfsdp.planning.tables.repeats import join_repeated
from mmfsdp.rehearsal.recording.step_records import KINDS, Allocation

__all__ = ["changes", "held_at", "highest", "ordered", "series", "shares"]


def changes(allocations: Iterable[Allocation]) -> list[tuple[int, int, str]]:
    """Return moment, change in bytes and kind of every allocation and release, in the order of moments.

    What is released at a moment comes before what is allocated at it.
    """
    found = []
    for item in allocations:
        found.append((item.begin, item.nbytes, item.kind))
        if item.end is not None:
            found.append((item.end, -item.nbytes, item.kind))
    return sorted(found, key=lambda change: (change[0], change[1]))


def highest(allocations: Iterable[Allocation]) -> tuple[int, int]:
    """Return the most bytes held at a time, and the first moment at which they are."""
    held = most = at = 0
    for moment, change, _ in changes(allocations):
        held += change
        if held > most:
            most, at = held, moment
    return most, at


def held_at(allocations: Iterable[Allocation], moment: int) -> Iterator[Allocation]:
    """Yield what is held right after a moment."""
    return (item for item in allocations if item.begin <= moment and (item.end is None or item.end > moment))


def ordered(counts: Counter[str]) -> dict[str, int]:
    """Return the kinds that are not 0, in the order of `KINDS`."""
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def series(allocations: Iterable[Allocation], last: int, points: int) -> list[tuple[int, dict[str, int]]]:
    """Return the bytes of each kind over time: of equal spans of moments, each at its highest.

    Args:
        allocations: All allocations.
        last: The last moment.
        points: How many spans at most.

    Returns:
        Moments in order, each with what is held at it.
    """
    width = max(-(-(last + 1) // points), 1)
    counts: Counter[str] = Counter()
    tops: dict[int, tuple[int, int, dict[str, int]]] = {}
    held = 0
    for moment, change, kind in changes(allocations):
        span = moment // width
        counts[kind] += change
        held += change
        if span not in tops or held > tops[span][0]:
            tops[span] = held, moment, dict(counts)
    return [(moment, ordered(Counter(counts))) for _, (_, moment, counts) in sorted(tops.items())]


def shares(allocations: Sequence[Allocation]) -> list[tuple[str, str, int, int]]:
    """Return name, kind, bytes and number of modules of what is held, the most first.

    Modules that differ in an index of their name only, and hold equally much, are one: ``layers.{0..31}``.
    """
    sizes: Counter[tuple[str, str]] = Counter()
    for item in allocations:
        sizes[item.module, item.kind] += item.nbytes
    items = [(module, (kind, size)) for (module, kind), size in sizes.items()]
    joined = []
    for repeated in join_repeated(items):
        _, (kind, size) = items[repeated.members[0]]
        joined.append((repeated.name, kind, size * len(repeated.members), len(repeated.members)))
    return sorted(joined, key=lambda row: -row[2])
