"""Compares which parameters changed between two steps: what one run alone changes is a difference. No torch."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import replace

from mmfsdp.parity.assembling import Assembled
from mmfsdp.parity.comparison import Comparison, Difference
from mmfsdp.parity.figures import distance
from mmfsdp.parity.records import CHANGED, Entry, Key, RankRecord
from mmfsdp.parity.tolerances import EPS, rounded_share

__all__ = ["add_changed"]


def add_changed(
    found: Comparison, runs: tuple[Mapping[Key, Assembled], Mapping[Key, Assembled]],
    records: Sequence[Sequence[RankRecord]], shared: Set[int],
) -> None:  # fmt: skip
    """Add, at the beginning of their step, parameters that one run changed since the step before, and the other not.

    A change that is not more than rounding a few elements is none: runs that clamp weights may differ by that.

    Args:
        found: What was found otherwise; it gets the differences.
        runs: The tensors of the reference and of the other run.
        records: What their ranks have recorded.
        shared: The steps that both have.
    """
    for (mine, other), record, text in (
        (runs, records[0], "it changed after the step before in the reference, and not in the other run"),
        (runs[::-1], records[1], "it changed after the step before, and not in the reference: stale weights or a copy"),
    ):
        changed = [key for key in mine if key.kind == CHANGED and key not in other and key.step in shared]
        if not changed:
            continue
        entries = [(rank.head["rank"], {entry.key: entry for entry in rank.entries}) for rank in record]
        for key in reversed(changed):  # each is put before those that follow it
            held = {rank: (of[key], of[left]) for rank, of in entries if key in of and (left := _left(key, of)) in of}
            if _is_rounding([*held.values()]):
                continue
            ranks = tuple(held) if len(held) < len(record) else ()
            on = f" on ranks {', '.join(map(str, ranks))} alone" if ranks else ""
            later = (at for at, item in enumerate(found.differences) if item.key.step >= key.step)
            place = next(later, len(found.differences))
            last = [item.key for item in found.compared if item.key.step < key.step] if place == 0 else []
            a, b = (
                tensor.figures.norm if (tensor := run.get(_left(key, run))) and tensor.figures else 0.0 for run in runs
            )
            difference = Difference(key, None, 0.0, a, b, f"{text}{on}", ranks, last[-1] if last else None)
            found.differences.insert(place, difference)


def _left(key: Key, run: Container[Key]) -> Key:
    """Return the key of what the step before has left: a parameter may have several updates in it."""
    found = Key(key.step - 1, "parameter", key.name, 0)
    while (later := replace(found, call=found.call + 1)) in run:
        found = later
    return found


def _is_rounding(held: Sequence[tuple[Entry, Entry]]) -> bool:
    """Return whether a parameter changed by no more than rounding a few elements; of ranks' parts now and before."""
    if not held:
        return False
    far = math.hypot(*(distance(now.figures, before.figures) for now, before in held))
    norm = math.hypot(*(before.figures.norm for _, before in held))
    count = sum(math.prod(now.sizes) for now, _ in held)
    return far <= rounded_share(EPS.get(held[0][0].dtype, 0.0), count) * norm
