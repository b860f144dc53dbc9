"""Draws the differences of two checkpoints as one page of HTML that needs nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mmfsdp.basics.pages.frame import html_page
from mmfsdp.basics.pages.markup import bar, branch, head_row, row, share, text
from mmfsdp.checkpoint.inspection.comparing import ValueDifference
from mmfsdp.checkpoint.inspection.difference import DiffReport

__all__ = ["diff_page"]

_ROWS = 5000  # of tensors that differ; a browser shows them at once
_LISTED = 200  # names in each list
_DEPTH = 30  # levels of modules
_LABELS = ("<1e-8", *(f"1e{power}" for power in range(-8, 0)), "1", "\u226510")


def diff_page(report: DiffReport) -> str:
    """Return a page of HTML that shows which modules differ, in how many elements, and by how much.

    The page has no scripts and loads nothing. It follows the reader's light or dark theme, and fits phones.

    Args:
        report: What `diff` returned, with ``histogram=True`` for the histograms.
    """
    root = _tree(report)
    changed = {item.name for item in report.values}
    total = sum(report.elements.values())
    differing = sum(item.differing or 0 for item in report.values)
    cards = [
        ("tensors equal", report.compared - len(changed), ""),
        ("tensors changed", len(changed), "changed"),
        ("only in A", len(report.only_in_a), "lone"),
        ("only in B", len(report.only_in_b), "lone"),
        ("other shapes", len(report.shapes), "lone"),
        ("other dtypes", len(report.dtypes), "lone"),
    ]
    shown = [f'<li class="{kind if count else ""}"><b>{count:,}</b> {label}</li>' for label, count, kind in cards]
    lists = [
        ("Only in A", report.only_in_a),
        ("Only in B", report.only_in_b),
        ("Other shapes", [f"{item.name}: {item.a} and {item.b}" for item in report.shapes]),
        ("Other dtypes", [f"{item.name}: {item.a} and {item.b}" for item in report.dtypes]),
        ("Not tensors", [f"{item.name}: {item.a!r} and {item.b!r}" for item in report.other]),
        ("Not compared", report.left_out),
    ]
    verdict = "the same" if report.same else "different"
    hint = f"<p>Most names match without <code>{text(report.prefix)}</code>.</p>" if report.prefix else ""
    parts = [
        f"<header><h1>Two checkpoints: {verdict}</h1>",
        f"<p><b>A</b> <code>{text(report.a)}</code><br><b>B</b> <code>{text(report.b)}</code></p></header>",
        f'<ul class="cards">{"".join(shown)}</ul>{hint}',
        f"<p>{differing:,} of {total:,} elements differ ({share(differing, total)}).</p>" if total else "",
        _large_histogram(_added(item.decades for item in report.values)),
        _modules(root),
        *(_list(title, names) for title, names in lists if names),
        f"<footer>{report.compared:,} tensors compared ({text(report.scope)}) in {report.seconds:.1f} s.</footer>",
    ]
    return html_page("Two checkpoints", "\n".join(part for part in parts if part), style=_STYLE)


@dataclass
class _ModuleSums:
    """A module: what its tensors sum up to."""

    name: str
    tensors: int = 0
    changed: int = 0
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    relative: float = 0.0
    decades: tuple[int, ...] = ()
    children: dict[str, _ModuleSums] = field(default_factory=dict)

    def add(self, elements: int, item: ValueDifference | None) -> None:
        self.tensors, self.elements = self.tensors + 1, self.elements + elements
        if item is not None:
            self.changed, self.differing = self.changed + 1, self.differing + (item.differing or 0)
            self.largest = max(self.largest, item.max_abs or 0.0)
            self.relative = max(self.relative, item.max_rel or 0.0)
            self.decades = _added([self.decades, item.decades])


def _tree(report: DiffReport) -> _ModuleSums:
    found = {item.name: item for item in report.values}
    root = _ModuleSums("")
    for name, elements in report.elements.items():
        node, item = root, found.get(name)
        root.add(elements, item)
        parts = re.findall(r"[^/.]*[/.]|[^/.]+$", name) or [name]
        for part in (*parts[:_DEPTH], *["".join(parts[_DEPTH:])] * (len(parts) > _DEPTH)):
            node = node.children.setdefault(part, _ModuleSums(part))
            node.add(elements, item)
    return root


def _modules(root: _ModuleSums) -> str:
    if not root.tensors:
        return ""
    rows: list[str] = []
    left, budget = max(0, root.changed - _ROWS), [_ROWS]
    for child in root.children.values():
        rows += _rows(child, budget, is_open=True)
    more = f"<p>{left:,} more tensors differ, which are not shown.</p>" if left else ""
    head = head_row("module", "elements that differ", "largest change", "changes by size")
    return f"<h2>Modules</h2><section>{head}{''.join(rows)}</section>{more}"


def _rows(node: _ModuleSums, budget: list[int], *, is_open: bool = False) -> Iterator[str]:
    name = node.name
    while len(node.children) == 1:  # lone children are joined
        [node] = node.children.values()
        name += node.name
    if not node.children:
        if node.changed:
            budget[0] -= 1
        if budget[0] >= 0:
            yield row(_cells(node, name))
    elif not node.changed:
        yield row(_cells(node, name))
    elif budget[0] > 0:
        below = (line for child in node.children.values() for line in _rows(child, budget))
        yield branch(_cells(node, name), below, is_open=is_open)


def _cells(node: _ModuleSums, name: str) -> str:
    tensors = f" <small>{node.tensors:,} tensors</small>" if node.children else ""
    if not node.changed:
        return (
            f'<span class="name">{text(name)}{tensors}</span><span class="same">equal</span><span></span><span></span>'
        )
    width = max(100 * node.differing / max(node.elements, 1), 1)
    relative = f" <small>{_number(node.relative)} \u00d7 the value</small>" if node.relative else ""
    return (
        f'<span class="name">{text(name)}{tensors}</span>'
        f'<span class="share">{bar(width)}{share(node.differing, node.elements)}</span>'
        f"<span>{_number(node.largest)}{relative}</span><span>{_small_histogram(node.decades)}</span>"
    )


def _small_histogram(decades: Sequence[int]) -> str:
    if not any(decades):
        return ""
    highest = max(decades)
    bars = "".join(
        f'<rect x="{6 * index}" y="{20 - height}" width="5" height="{height}">'
        f"<title>{_bar_text(index, number)}</title></rect>"
        for index, number in enumerate(decades)
        if (height := max(1, round(20 * number / highest)) if number else 0)
    )
    return f'<svg viewBox="0 0 {6 * len(decades)} 20" width="{6 * len(decades)}" height="20" role="img">{bars}</svg>'


def _large_histogram(decades: Sequence[int]) -> str:
    if not any(decades):
        return ""
    highest, total = max(decades), sum(decades)
    bars = "".join(
        f'<li title="{_bar_text(index, number)}"><em>{share(number, total) if number else ""}</em>'
        f'<b style="height:{75 * number / highest:.1f}%"></b><span>{_LABELS[index]}</span></li>'
        for index, number in enumerate(decades)
    )
    return (
        f'<h2>Changes by size</h2><ol class="chart">{bars}</ol>'
        '<p class="note">How many elements differ by how much, relative to B. A bar counts from its label to the '
        "next.</p>"
    )


def _bar_text(index: int, number: int) -> str:
    if index == 0:
        return f"{number:,} elements: less than 1e-8 of the value"
    if index == len(_LABELS) - 1:
        return f"{number:,} elements: 10 times the value or more"
    return f"{number:,} elements: 1e{index - 9} to 1e{index - 8} of the value"


def _list(title: str, names: Sequence[str]) -> str:
    items = "".join(f"<li><code>{text(name)}</code></li>" for name in names[:_LISTED])
    more = f"<li>and {len(names) - _LISTED:,} more</li>" if len(names) > _LISTED else ""
    return f'<details class="list"><summary><h2>{title} ({len(names):,})</h2></summary><ul>{items}{more}</ul></details>'


def _added(many: Sequence[Sequence[int]] | Iterator[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(one for one in many if one), strict=True)))


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.2g}"


_STYLE = """
.same { color: var(--dim); }
.cards .changed b { color: var(--mark); } .cards .lone b { color: var(--warn); }
.chart { display: flex; gap: 3px; height: 11rem; padding: 0; margin: 0; list-style: none; max-width: 44rem; }
.chart li { flex: 1; display: flex; flex-direction: column; justify-content: flex-end; text-align: center;
  min-width: 0; }
.chart b { background: var(--mark); border-radius: 3px 3px 0 0; min-height: 0; }
.chart span { font-size: .75rem; color: var(--dim); border-top: 1px solid var(--line); padding-top: .2rem; }
.chart em { font-size: .7rem; font-style: normal; color: var(--dim); white-space: nowrap; }
.row { grid-template-columns: minmax(0, 1fr) 13rem 13rem 5rem; }
.list summary { cursor: pointer; } .list h2 { display: inline-block; margin: .4rem 0; }
svg { fill: var(--mark); display: block; }
@media (max-width: 48rem) { .row { grid-template-columns: minmax(0, 1fr) auto; } }
"""
