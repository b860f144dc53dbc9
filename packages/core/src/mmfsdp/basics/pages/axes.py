"""Draws the frame of a chart: horizontal lines with labels, and phases with names. Both grow with the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmfsdp.basics.pages.markup import text

__all__ = ["STYLE", "level_lines", "phase_marks"]


def level_lines(marks: Iterable[tuple[float, str]]) -> str:
    """Return horizontal lines.

    Args:
        marks: The height of each as a share of the chart's, from the bottom, with its label, as text.
    """
    return "".join(
        f'<i class="level" style="bottom:{100 * height:.2f}%"><span>{text(label)}</span></i>' for height, label in marks
    )


def phase_marks(begins: Sequence[tuple[str, float]], end: float) -> str:
    """Return a box for each phase of the horizontal axis, with its name where that fits.

    Args:
        begins: Names of the phases, with where they begin.
        end: Where the last one ends, in the same unit.
    """
    boxes = []
    ends = [begin for _, begin in begins[1:]] + [end]
    for index, ((name, begin), until) in enumerate(zip(begins, ends, strict=True)):
        odd = " odd" if index % 2 else ""
        boxes.append(
            f'<i class="phase{odd}" style="left:{100 * begin / end:.3f}%;width:{100 * (until - begin) / end:.3f}%" '
            f'title="{text(name)}"><span class="fit"><span>{text(name)}</span></span></i>'
        )
    return "".join(boxes)


STYLE = """
main { --gutter: 4.4rem; }
figure { margin: .5rem 0 1rem; } figcaption { font-size: .85rem; color: var(--dim); margin-top: .4rem; }
.plot { position: relative; background: var(--soft); margin: 2rem 0 0 var(--gutter); }
.plot > svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; }
.plot i { position: absolute; font-style: normal; }
.phase { top: -1.4rem; bottom: 0; border-left: 1px solid var(--line); font-size: .75rem; color: var(--dim); }
.phase .fit { height: 1.4rem; line-height: 1.4rem; padding-left: .25rem; }
.phase.odd::after { content: ""; position: absolute; inset: 1.4rem 0 0; background: var(--line); opacity: .35; }
.level { left: 0; right: 0; border-bottom: 1px dotted var(--dim); pointer-events: none; }
.level span { position: absolute; right: 100%; bottom: -.6em; padding-right: .4rem; white-space: nowrap;
  font-size: .75rem; line-height: 1.2; color: var(--dim); }
"""
