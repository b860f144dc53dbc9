"""Joins the names of equal layers into one: ``blocks.0`` to ``blocks.31`` become ``blocks.{0..31}``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Repeated", "join_ranges", "join_repeated"]

_INDEX = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a part of a name that is a number

_Item = tuple[list[str], Hashable, list[int]]
"""The parts of a name, its key, and positions."""


@dataclass(frozen=True)
class Repeated:
    """Names that differ in indices only, as one."""

    name: str
    members: list[int]
    """Positions of the names in the input."""


def join_repeated(items: Sequence[tuple[str, Hashable]]) -> list[Repeated]:
    """Join names that differ in an index and have equal keys, in the order of their first appearance.

    Args:
        items: Names, each with a key; only names with equal keys are joined.
    """
    found: list[_Item] = [(_INDEX.split(name), key, [index]) for index, (name, key) in enumerate(items)]
    deepest = max((len(parts) for parts, _, _ in found), default=0)
    for index in range(deepest - 2, 0, -2):  # numbers are the parts at odd indices, the last one first
        groups: dict[Hashable, list[_Item]] = {}
        for item in found:
            parts, key, members = item
            if len(parts) > index:
                groups.setdefault((*parts[:index], None, *parts[index + 1 :], key), []).append(item)
            else:
                groups[("", members[0])] = [item]
        found = [_joined(group, index) for group in groups.values()]
    return [Repeated("".join(parts), members) for parts, _, members in found]


def join_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges in braces: ``'{0..3,8}'``; a single one as itself."""
    if len(numbers) == 1:
        return str(numbers[0])
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return "{" + ",".join("..".join(map(str, item)) for item in ranges) + "}"


def _joined(group: list[_Item], index: int) -> _Item:
    parts, key, members = group[0]
    if group[1:]:
        numbers = join_ranges([int(other[index]) for other, _, _ in group])
        parts = [*parts[:index], numbers, *parts[index + 1 :]]
        members = [member for _, _, found in group for member in found]
    return parts, key, members
