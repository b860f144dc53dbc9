"""`Comparison`: what comparing two records has found, as text and as plain values."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from mmfsdp.parity.records.record_files import Key

__all__ = ["Compared", "Comparison", "Difference"]


@dataclass(frozen=True)
class Compared:
    """One tensor that both runs have."""

    key: Key
    distance: float
    """How far the two are apart, as a share of the reference's norm."""
    limit: float
    """How far they may be."""
    differs: bool


@dataclass(frozen=True)
class Difference:
    """A tensor that differs by more than it may."""

    key: Key
    distance: float | None
    """How far it is from the reference's, as a share of its norm; None if only one run has it."""
    limit: float
    a: float
    """The norm in the reference."""
    b: float
    """The norm in the other run."""
    why: str
    """The cause that the shape of the difference suggests."""
    ranks: tuple[int, ...]
    """The ranks that are wrong, if only some are."""
    equal_before: Key | None
    """The tensor that was computed right before, and is equal. Known of the first difference."""

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        before = None if self.equal_before is None else _plain(self.equal_before)
        numbers = {"distance": self.distance, "limit": self.limit, "norm_a": self.a, "norm_b": self.b}
        shown = {name: _number(value) for name, value in numbers.items()}
        return {**_plain(self.key), **shown, "why": self.why, "wrong_ranks": [*self.ranks], "equal_before": before}

    def __str__(self) -> str:
        if self.distance is None:
            return f"{self.key}: {self.why}"
        norms = f"norms {self.a:.6g} and {self.b:.6g}"
        parts = f"{self.distance:.2g} apart, {self.limit:.2g} allowed", norms, self.why
        return f"{self.key}: {'; '.join(filter(None, parts))}"


@dataclass
class Comparison:
    """The result of comparing two records."""

    a: str
    b: str
    worlds: tuple[int, int]
    """The ranks of both runs."""
    compared: list[Compared] = field(default_factory=list)
    """Compared tensors, in the order of the reference's computation."""
    differences: list[Difference] = field(default_factory=list)
    """Tensors that differ by more than their tolerance, in the same order."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Why tensors were not compared, and how many."""
    notes: list[str] = field(default_factory=list)
    """Other differences."""
    dtypes: defaultdict[tuple[str, str], list[Key]] = field(default_factory=lambda: defaultdict(list))
    """Equal tensors whose dtypes differ, by the dtypes of the two runs."""

    @property
    def same(self) -> bool:
        """Whether tensors were compared, and none differs by more than it may."""
        return bool(self.compared) and not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of computation."""
        return self.differences[0] if self.differences else None

    @property
    def closest(self) -> float:
        """The largest distance as a share of what is allowed, of the tensors that do not differ."""
        return max((item.distance / item.limit for item in self.compared if item.limit and not item.differs), default=0)

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        return {
            "a": self.a,
            "b": self.b,
            "world_sizes": [*self.worlds],
            "same": self.same,
            "compared": len(self.compared),
            "differences": [difference.describe() for difference in self.differences],
            "skipped": dict(self.skipped),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [*self.notes]
        lines += [f"Not compared: {count} tensors ({why})." for why, count in self.skipped.items()]
        if (first := self.first) is not None:
            lines.append(f"The first difference: {first}.")
            if first.equal_before is not None:
                lines.append(f"Equal right before: {first.equal_before}.")
            lines.append(f"{len(self.differences)} of {len(self.compared)} compared tensors differ.")
        elif self.compared:
            steps = len({item.key.step for item in self.compared})
            lines.append(
                f"Equal: {len(self.compared)} tensors of {steps} step{'s' if steps > 1 else ''}, {self.worlds[0]} and "
                f"{self.worlds[1]} ranks. The largest difference is {self.closest:.0%} of what is allowed."
            )
        else:
            lines.append("Nothing was compared: the runs have no tensor in common.")
        return "\n".join(lines)


def _plain(key: Key) -> dict[str, Any]:
    return {"step": key.step, "kind": key.kind, "name": key.name, "call": key.call}


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
