"""Draws the frame of a chart over time: lines with sizes, and the phases of the step. Numbers grow with the page."""

from __future__ import annotations

from collections.abc import Sequence

from mmfsdp.basics.pages.markup import text
from mmfsdp.basics.text import human_bytes

__all__ = ["STYLE", "phase_marks", "size_lines"]

_LINES = 5


def size_lines(top: int) -> str:
    """Return horizontal lines at round numbers of bytes up to the top of a chart."""
    step = 1
    while top / step > _LINES:
        step *= 2
    lines = []
    for index in range(1, int(top / step) + 1):
        label = human_bytes(index * step).replace(".00", "")
        lines.append(f'<i class="level" style="bottom:{100 * index * step / top:.2f}%"><span>{label}</span></i>')
    return "".join(lines)


def phase_marks(phases: Sequence[tuple[str, float]], end: float) -> str:
    """Return a box for each phase of the step, with its name.

    Args:
        phases: Names, with where they begin.
        end: Where the last one ends, in the same unit.
    """
    marks = []
    ends = [begin for _, begin in phases[1:]] + [end]
    for index, ((name, begin), until) in enumerate(zip(phases, ends, strict=True)):
        odd = " odd" if index % 2 else ""
        marks.append(
            f'<i class="phase{odd}" style="left:{100 * begin / end:.3f}%;width:{100 * (until - begin) / end:.3f}%" '
            f'title="{text(name)}"><span>{text(name)}</span></i>'
        )
    return "".join(marks)


STYLE = """
figure { margin: .5rem 0 1rem; } figcaption { font-size: .85rem; color: var(--dim); }
.plot { position: relative; background: var(--soft); margin-top: 1.3rem; }
.plot > svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; }
.plot i { position: absolute; font-style: normal; }
.phase { top: -1.3rem; bottom: 0; border-left: 1px solid var(--line); font-size: .72rem; color: var(--dim); }
.phase span { display: block; line-height: 1.3rem; padding-left: .25rem; overflow: hidden; white-space: nowrap;
  text-overflow: ellipsis; }
.phase.odd::after { content: ""; position: absolute; inset: 1.3rem 0 0; background: var(--line); opacity: .35; }
.level { left: 0; right: 0; border-bottom: 1px dotted var(--dim); pointer-events: none; }
.level span { position: absolute; left: .25rem; bottom: 0; font-size: .7rem; color: var(--ink);
  background: color-mix(in srgb, var(--page) 75%, transparent); padding: 0 .2rem; line-height: 1.1; }
"""
