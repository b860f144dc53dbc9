"""Computes the memory of a step of a deep model from rehearsals of copies with fewer layers. Pure and torch-free.

Each further layer adds the same amount to what is held while the second layer runs, the last one, or the loss. So the
highest amount at each such point is followed separately: the whole model need not peak at the point at which its short
copies peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmfsdp.rehearsal.allocator.accounting import ordered
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["ACTIVATIONS", "Highest", "combined", "highest_by_point"]

ACTIVATIONS = frozenset(("activation", "recomputed", "activation gradient", "input", "buffer"))
"""Kinds that do not depend on how parameters are sharded."""

_ENDS = 2  # layers at either end of a stack that are told apart

Point = tuple[int, str, str, str, str]
"""The number of the phase and its name, the layer that ran last, the module and the kind of what is allocated."""


@dataclass(frozen=True, slots=True)
class Highest:
    """The most bytes that are held at a point of the step."""

    phase: str
    module: str
    by_kind: Mapping[str, float]

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds."""
        return round(sum(self.by_kind.values()))

    @property
    def activations(self) -> float:
        """Bytes of kinds that do not depend on how parameters are sharded."""
        return sum(size for kind, size in self.by_kind.items() if kind in ACTIVATIONS)


def highest_by_point(
    rehearsal: Rehearsal, depths: Mapping[str, tuple[int, int]], kinds: Iterable[str] | None = None
) -> dict[Point, Highest]:
    """Return the most that is held at each point of a step.

    Args:
        rehearsal: The step.
        depths: For each stack of layers its first one, and how many they are.
        kinds: Only these kinds of memory; default: all.
    """
    wanted = None if kinds is None else frozenset(kinds)
    events = []
    for item in rehearsal.allocations:
        if wanted is None or item.kind in wanted:
            events.append((item.begin, item.nbytes, item.kind, item.module))
            if item.end is not None:
                events.append((item.end, -item.nbytes, item.kind, item.module))
    events.sort(key=lambda event: event[:2])  # what is released at a moment comes first
    names = _Names(depths)
    held, phase, layer = 0, -1, ""
    tops: dict[Point, tuple[int, int]] = {}  # the most, and the number of the event that leads to it
    for number, (moment, change, kind, module) in enumerate(events):
        held += change
        if change < 0:
            continue
        while phase + 1 < len(rehearsal.phases) and rehearsal.phases[phase + 1][1] <= moment:
            phase, layer = phase + 1, ""
        name, found = names.of(module)
        layer = found or layer
        key = (phase, "before" if phase < 0 else rehearsal.phases[phase][0], layer, name, kind)
        if key not in tops or held > tops[key][0]:
            tops[key] = held, number
    highest, counts, done = {}, Counter[str](), 0
    for key, (_, number) in sorted(tops.items(), key=lambda item: item[1][1]):
        for _, change, kind, _ in events[done : number + 1]:
            counts[kind] += change
        done = number + 1
        highest[key] = Highest(key[1], events[number][3], dict(counts))
    return highest


def combined(parts: Sequence[tuple[float, Mapping[Point, Highest]]]) -> Highest:
    """Return the peak of the whole model: the largest weighted sum over the points that all parts have.

    Args:
        parts: The weight and the points of each short model. Names of modules come from the last one.
    """
    shared = set.intersection(*(set(points) for _, points in parts))
    best = Highest("", "", {})
    most = 0.0
    for key in shared:
        total = sum(weight * points[key].nbytes for weight, points in parts)
        if total > most:
            sums: Counter[str] = Counter()
            for weight, points in parts:
                for kind, size in points[key].by_kind.items():
                    sums[kind] += weight * size  # type: ignore[assignment]
            whole = ordered(Counter({kind: round(size) for kind, size in sums.items()}))
            most, best = total, Highest(key[1], parts[-1][1][key].module, whole)
    return best


class _Names:
    """Names of modules, with layers counted from either end of their stack."""

    def __init__(self, depths: Mapping[str, tuple[int, int]]) -> None:
        self._depths = depths
        self._known: dict[str, tuple[str, str]] = {}

    def of(self, module: str) -> tuple[str, str]:
        """Return the name, and the layer as text; an empty one outside of all stacks."""
        if module not in self._known:
            self._known[module] = self._found(module)
        return self._known[module]

    def _found(self, module: str) -> tuple[str, str]:
        for fqn, (first, depth) in self._depths.items():
            prefix = f"{fqn}." if fqn else ""
            number, _, rest = module.removeprefix(prefix).partition(".")
            if module.startswith(prefix) and number.isdigit():
                index = int(number) - first
                if 0 <= index < depth:
                    return f"{prefix}*.{rest}", f"{fqn} {_end(index, depth)}"
                if index >= depth:
                    return f"{prefix}{index - depth}.{rest} after", ""
        return module, ""


def _end(index: int, depth: int) -> str:
    if index < _ENDS:
        return str(index)
    return str(index - depth) if depth - index <= _ENDS else "inner"
