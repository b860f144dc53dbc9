"""Shows a comparison as one page of HTML: differences along the network and over steps. It needs no torch."""

from __future__ import annotations

import math

from mmfsdp.basics.pages.frame import html_page
from mmfsdp.basics.pages.markup import head_row, row, text
from mmfsdp.parity.comparing.comparison import Compared, Comparison

__all__ = ["comparison_page"]

_WIDTH, _HEIGHT, _SHOWN = 960, 220, 200

_STYLE = """
.row { grid-template-columns: 1fr 7rem 7rem; } svg { width: 100%; height: auto; } .bad { color: var(--warn); }
circle { fill: var(--mark); } circle.bad { fill: var(--warn); } line { stroke: var(--dim); stroke-dasharray: 4; }
text { fill: var(--dim); font-size: 12px; }
"""


def comparison_page(found: Comparison) -> str:
    """Return a page that shows each compared tensor as a point, by the order of computation and how far it is apart.

    The height of a point is the distance as a share of what is allowed, on a logarithmic scale.

    Args:
        found: The comparison.
    """
    verdict = "Equal" if found.same else "Different"
    lines = "".join(f"<p>{text(line)}</p>" for line in str(found).splitlines())
    steps = sorted({item.key.step for item in found.compared})
    charts = [_chart([item for item in found.compared if item.key.step == step], step) for step in steps]
    body = f"<h1>{verdict}: {text(found.a)} and {text(found.b)}</h1>{lines}{''.join(charts)}{_table(found)}"
    return html_page(f"{verdict}: {found.a} and {found.b}", body, style=_STYLE)


def _chart(items: list[Compared], step: int) -> str:
    points = []
    for index, item in enumerate(items):
        share = item.distance / item.limit if item.limit else (math.inf if item.differs else 0.0)
        x = _WIDTH * (index + 0.5) / len(items)
        kind = ' class="bad"' if item.differs else ""
        shown = f"{item.key}: {item.distance:.2g} apart, {item.limit:.2g} allowed"
        points.append(f'<circle{kind} cx="{x:.1f}" cy="{_y(share):.1f}" r="3"><title>{text(shown)}</title></circle>')
    allowed = _y(1.0)
    frame = f'<line x1="0" x2="{_WIDTH}" y1="{allowed:.1f}" y2="{allowed:.1f}"/>'
    frame += f'<text x="4" y="{allowed - 4:.1f}">allowed</text>'
    label = f"Step {step}: {len(items)} tensors in the order of computation"
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{frame}{"".join(points)}</svg>'
    return f"<h2>{label}</h2>{svg}"


def _y(share: float) -> float:
    """Return the height of a point: shares from 1e-6 to 1e6."""
    power = 6.0 if share == math.inf else math.log10(max(share, 1e-6)) if share == share else 6.0
    return _HEIGHT / 2 - max(-6.0, min(6.0, power)) * (_HEIGHT - 20) / 12


def _table(found: Comparison) -> str:
    if not found.differences:
        return ""
    rows = [head_row("Tensor", "apart", "allowed")]
    for item in found.differences[:_SHOWN]:
        far = "" if item.distance is None else f"{item.distance:.2g}"
        name = f'<span class="name">{text(str(item.key))} <small>{text(item.why)}</small></span>'
        rows.append(row(f'{name}<span class="bad">{far}</span><span>{item.limit:.2g}</span>'))
    hidden = len(found.differences) - _SHOWN
    more = f'<p class="note">{hidden} more differ.</p>' if hidden > 0 else ""
    return f"<h2>What differs</h2>{''.join(rows)}{more}"
