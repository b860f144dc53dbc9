"""Says how two or more rehearsals differ: in their plans, their peaks, and what they send."""

from __future__ import annotations

from collections.abc import Sequence

from mmfsdp.basics.pages.markup import name_text, share, signed, size, table, text
from mmfsdp.basics.text import human_bytes
from mmfsdp.rehearsal.recording.step_records import KINDS
from mmfsdp.rehearsal.reporting.looks import key_of
from mmfsdp.rehearsal.result import Rehearsal
from mmfsdp.rehearsal.timing.step_time import StepTime, human_seconds

__all__ = ["compared"]

_LINES = 60  # of the differences of two plans
_LONGEST = 300  # characters of a line


def compared(steps: Sequence[Rehearsal], times: Sequence[StepTime], names: Sequence[str]) -> str:
    """Return how each rehearsal differs from the first one, as sentences, a table and the differences of the plans."""
    first, *others = steps
    parts = []
    for step, time, name in zip(others, times[1:], names[1:], strict=True):
        told = f"{_sentence(first, step, names[0], name)} {_duration(times[0], time)}"
        parts.append(f"<p>{told}</p>{_table(first, step, names[0], name)}")
        lines = first.plan.diff(step.plan).splitlines()
        if not lines:
            parts.append("<p>The plans are the same: the batches, the optimizers or the loops differ.</p>")
            continue
        shown = "\n".join(text(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...") for line in lines[:_LINES])
        more = f"\nand {len(lines) - _LINES} more" if lines[_LINES:] else ""
        title = f"How the plan of {name_text(name)} differs: {len(lines)} line{'s' if lines[1:] else ''}"
        parts.append(f"<details open><summary>{title}</summary><pre>{shown}{more}</pre></details>")
    return "".join(parts)


def _sentence(first: Rehearsal, other: Rehearsal, name: str, other_name: str) -> str:
    change = other.peak.nbytes - first.peak.nbytes
    if not change:
        return f"<b>{name_text(other_name)}</b> and <b>{name_text(name)}</b> need the same at their peaks."
    verb = "more" if change > 0 else "less"
    kinds = {
        kind: other.peak.by_kind.get(kind, 0) - first.peak.by_kind.get(kind, 0)
        for kind in dict.fromkeys([*first.peak.by_kind, *other.peak.by_kind])
    }
    largest = max(kinds, key=lambda kind: abs(kinds[kind]))
    sent = _sent(other) - _sent(first)
    much = f"{human_bytes(abs(sent))} {'more' if sent > 0 else 'less'}" if sent else "as much"
    return (
        f"At its peak, <b>{name_text(other_name)}</b> needs {size(abs(change))} {verb} than <b>{name_text(name)}</b>: "
        f"{size(other.peak.nbytes)}, not {size(first.peak.nbytes)}. The largest change is {signed(kinds[largest])} of "
        f"{text(largest)}. It sends {much} in a step."
    )


def _duration(first: StepTime, other: StepTime) -> str:
    if not first.seconds or not other.seconds:
        return ""
    ratio = other.seconds / first.seconds
    if abs(ratio - 1) < 0.005:
        return f"A step takes as long: {text(human_seconds(other.seconds))}."
    seconds = f"{text(human_seconds(other.seconds))}, not {text(human_seconds(first.seconds))}"
    return f"A step takes {ratio:.2f} times as long: {seconds}."


def _table(first: Rehearsal, other: Rehearsal, name: str, other_name: str) -> str:
    one, two = first.peak.by_kind, other.peak.by_kind
    pairs = [
        (f'<i class="swatch k-{key_of(kind)}"></i>{text(kind)}', one.get(kind, 0), two.get(kind, 0))
        for kind in KINDS
        if kind in one or kind in two
    ]
    pairs += [
        ("peak", first.peak.nbytes, other.peak.nbytes),
        ("between steps", sum(first.static.values()), sum(other.static.values())),
        ("sent in the step", _sent(first), _sent(other)),
    ]
    rows = [(title, size(a), size(b), f"{signed(b - a)} <small>{_ratio(a, b)}</small>") for title, a, b in pairs]
    caption = f"Held at the peak, by kind. Differences are those of {other_name} from {name}, in percent of {name}."
    return table(caption, ("", name, other_name, "difference"), rows)


def _ratio(first: int, other: int) -> str:
    """Return a difference relative to the first of two sizes, in percent."""
    sign = "+" if other > first else "\u2212"
    return "" if first == other else f"{sign}{share(abs(other - first), first)}" if first else "new"


def _sent(step: Rehearsal) -> int:
    return sum(item.nbytes for item in step.collectives if item.ranks > 1)
