"""Shows a comparison as one page of HTML: differences along the network and over steps. It needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmfsdp.basics.pages import axes
from mmfsdp.basics.pages.frame import html_page
from mmfsdp.basics.pages.markup import name_text, table, text, verdict
from mmfsdp.parity.comparing.comparison import Compared, Comparison

__all__ = ["comparison_page"]

_FIRST, _SHOWN = 20, 200  # rows that are seen at once, and in all
_POWERS = 6.0  # of ten, above and below what is allowed, that a chart shows
_LEVELS = ((-4, "1/10,000"), (-2, "1/100"), (0, "allowed"), (2, "100 \u00d7"), (4, "10,000 \u00d7"))
_AXES = (
    "From left to right: tensors in the order of computation. Height: how far the two runs are apart, relative to what "
    "is allowed; each line is 100 times the one below."
)


def comparison_page(found: Comparison) -> str:
    """Return a page that shows each compared tensor as a point, by the order of computation and how far it is apart.

    The height of a point is the distance as a share of what is allowed, on a logarithmic scale.

    Args:
        found: The comparison.
    """
    steps = sorted({item.key.step for item in found.compared})
    sides = zip("AB", (found.a, found.b), found.worlds, ("the reference, ", ""), strict=True)
    head = verdict(
        "good" if found.same else "bad",
        _verdict(found),
        *(
            f"<p><b>{side}</b> <code>{name_text(path)}</code> ({what}{ranks:,} rank{'' if ranks == 1 else 's'})</p>"
            for side, path, ranks, what in sides
        ),
    )
    body = [
        head,
        *(f"<p>{name_text(line)}</p>" for line in str(found).splitlines()),
        *(_chart([item for item in found.compared if item.key.step == step], step) for step in steps),
        f'<p class="note">{_AXES}</p>' if steps else "",
        _differences(found),
        _all(found.compared),
    ]
    return html_page(f"{_verdict(found)}: {found.a} and {found.b}", "".join(body), style=axes.STYLE + _STYLE)


def _verdict(found: Comparison) -> str:
    """Return what differs, in a line."""
    number = f"{len(found.compared):,} tensor{'' if len(found.compared) == 1 else 's'}"
    if found.same:
        return f"Equal: {number}"
    return f"Different: {len(found.differences):,} of {number}" if found.compared else "Nothing to compare"


def _chart(items: Sequence[Compared], step: int) -> str:
    points = []
    for index, item in enumerate(items):
        kind = ' class="bad"' if item.differs else ""
        shown = f"{item.key}: {item.distance:.2g} apart, {item.limit:.2g} allowed"
        across = 1000 * (index + 0.5) / len(items)
        points.append(
            f'<path{kind} d="M{across:.1f} {1000 - 1000 * _height(item):.1f}h0"><title>{text(shown)}</title></path>'
        )
    title = f"Step {step}: {len(items):,} tensors"
    lines = axes.level_lines((0.5 + power / 2 / _POWERS, name) for power, name in _LEVELS)
    return (
        f'<h2>{title}</h2><div class="plot"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" '
        f'role="img" aria-label="{title} by how far they are apart">{"".join(points)}</svg>{lines}</div>'
    )


def _height(item: Compared) -> float:
    """Return the height of a point as a share of the chart's; what is allowed is in the middle."""
    share = item.distance / item.limit if item.limit else (math.inf if item.differs else 0.0)
    power = math.log10(share) if 0 < share < math.inf else -_POWERS if share == 0 else _POWERS
    return 0.5 + max(-0.97, min(0.97, power / _POWERS)) / 2


def _differences(found: Comparison) -> str:
    rows = [
        _row(f"{name_text(str(item.key))}</code> <small>{name_text(item.why)}</small>", item.distance, item.limit)
        for item in found.differences
    ]
    if not rows:
        return ""
    rest = f"<details><summary>{len(rows) - _FIRST:,} more</summary>{_table(rows[_FIRST:])}</details>"
    return f"<h2>What differs</h2>{_table(rows[:_FIRST])}{rest if rows[_FIRST:] else ''}"


def _all(items: Sequence[Compared]) -> str:
    rows = [_row(f"{name_text(str(item.key))}</code>", item.distance, item.limit) for item in items]
    return f"<details><summary>All that was compared</summary>{_table(rows)}</details>" if rows else ""


def _row(name: str, distance: float | None, limit: float) -> tuple[str, str, str]:
    far = "" if distance is None else f"{distance:.2g}"
    bad = distance is not None and distance > limit
    return f"<code>{name}", f'<b class="bad">{far}</b>' if bad else far, f"{limit:.2g}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    caption = "In the order of computation. Apart: the norm of the difference, relative to the norm in A."
    more = f'<p class="note">{len(rows) - _SHOWN:,} more.</p>' if rows[_SHOWN:] else ""
    return table(caption, ("tensor", "apart", "allowed"), rows[:_SHOWN]) + more


_STYLE = """
.plot { height: 13rem; margin-top: .5rem; } table { width: 100%; }
.plot path { stroke: var(--mark); stroke-width: 7px; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.plot path.bad { stroke: var(--warn); } b.bad { color: var(--warn); }
.plot .level:nth-of-type(3) { border-bottom: 2px solid var(--dim); }
"""
