"""Draws the differences of two checkpoints as one page of HTML that needs nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mmfsdp.basics.pages.frame import html_page
from mmfsdp.basics.pages.markup import bar, branch, head_row, label, name_text, row, share, text, verdict
from mmfsdp.checkpoint.inspection.comparing import ValueDifference
from mmfsdp.checkpoint.inspection.difference import DiffReport

__all__ = ["diff_page"]

_ROWS = 5000  # of tensors that differ; a browser shows them at once
_LISTED = 200  # names in each list
_DEPTH = 30  # levels of modules
_FAR = "|A\u00a0\u2212\u00a0B|"  # how far an element of A is from the one of B
_RELATIVE = f"{_FAR}\u00a0/\u00a0|B|"
_COLUMNS = ("elements that differ", f"largest {_FAR}", f"largest {_RELATIVE}", f"by {_RELATIVE}")
_LABELS = ("<10<sup>\u22128</sup>", *(f"10<sup>\u2212{power}</sup>" for power in range(8, 0, -1)), "1", "\u226510")


def diff_page(report: DiffReport) -> str:
    """Return a page of HTML that shows which modules differ, in how many elements, and by how much.

    The page has no scripts and loads nothing. It follows the reader's light or dark theme, and fits phones.

    Args:
        report: What `diff` returned, with ``histogram=True`` for the histograms.
    """
    root = _tree(report)
    cards = [
        ("tensors equal", report.compared - root.changed, ""),
        ("tensors changed", root.changed, "changed"),
        ("only in A", len(report.only_in_a), "lone"),
        ("only in B", len(report.only_in_b), "lone"),
        ("other shapes", len(report.shapes), "lone"),
        ("other dtypes", len(report.dtypes), "lone"),
    ]
    shown = [f'<li class="{kind if count else "none"}"><b>{count:,}</b> {title}</li>' for title, count, kind in cards]
    lists = [
        ("Only in A", report.only_in_a),
        ("Only in B", report.only_in_b),
        ("Other shapes", [f"{item.name}: {item.a} and {item.b}" for item in report.shapes]),
        ("Other dtypes", [f"{item.name}: {item.a} and {item.b}" for item in report.dtypes]),
        ("Not tensors", [f"{item.name}: {item.a!r} and {item.b!r}" for item in report.other]),
        ("Not compared", report.left_out),
    ]
    hint = f"<p>Most names match without <code>{text(report.prefix)}</code>.</p>" if report.prefix else ""
    parts = [
        verdict(
            "good" if report.same else "bad",
            _verdict(report),
            *(
                f"<p><b>{side}</b> <code>{name_text(path)}</code></p>"
                for side, path in (("A", report.a), ("B", report.b))
            ),
        ),
        f'<ul class="cards">{"".join(shown)}</ul>{hint}',
        f"<p>{root.differing:,} of {root.elements:,} elements differ ({share(root.differing, root.elements)}).</p>"
        if root.elements
        else "",
        _large_histogram(root.decades),
        _modules(root),
        *(_list(title, names) for title, names in lists if names),
        f"<footer>{report.compared:,} tensors compared ({text(report.scope)}) in {report.seconds:.1f} s.</footer>",
    ]
    return html_page("Two checkpoints", "\n".join(part for part in parts if part), style=_STYLE)


def _verdict(report: DiffReport) -> str:
    """Return what differs, in a line."""
    if report.same:
        return f"The same: {report.compared:,} tensor{'' if report.compared == 1 else 's'}"
    alone = len(report.only_in_a) + len(report.only_in_b)
    unlike = len(report.shapes) + len(report.dtypes)
    found = [
        f"{len(report.values):,} of {report.compared:,} tensors" if report.values else "",
        f"{alone:,} in one only" if alone else "",
        f"{unlike:,} of other shapes or dtypes" if unlike else "",
        f"{len(report.other):,} other values" if report.other else "",
    ]
    return f"Different: {', '.join(filter(None, found))}"


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
    note = (
        f'<p class="note">{_FAR} is how far an element of A is from the one of B; divided by |B|, it is relative '
        "to the element of B. Each column has the largest of all elements, which may be different ones.</p>"
    )
    head = head_row("module", *_COLUMNS)
    return f"<h2>Modules</h2><section>{head}{''.join(rows)}</section>{more}{note if root.changed else ''}"


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
    head = f'<span class="name">{name_text(name)}{tensors}</span>'
    if not node.changed:
        return f'{head}<span class="same">equal</span>'
    width = max(100 * node.differing / max(node.elements, 1), 1)
    shown = (
        share(node.differing, node.elements),
        _number(node.largest),
        _number(node.relative),
        _small_histogram(node.decades),
    )
    cells = [f"{label(title)}{cell}" for title, cell in zip(_COLUMNS, shown, strict=True)]
    return (
        f'{head}<span class="share">{bar(width)}{cells[0]}</span><span>{cells[1]}</span><span>{cells[2]}</span>'
        f"<span>{cells[3]}</span>"
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
        f'<li title="{_bar_text(index, number)}"><em>{_percent(number, total)}</em>'
        f'<b style="height:{75 * number / highest:.1f}%"></b><span>{_LABELS[index]}</span></li>'
        for index, number in enumerate(decades)
    )
    return (
        f'<h2>Elements by how much they differ</h2><figure><ol class="chart">{bars}</ol>'
        f"<figcaption>From left to right: the difference of an element, relative to B: {_RELATIVE}, from each "
        "label to the next. Shares are of the elements that differ.</figcaption></figure>"
    )


def _percent(number: int, total: int) -> str:
    percent = 100 * number / total
    return "" if not number else "<1\u00a0%" if percent < 1 else f"{percent:.0f}\u00a0%"


def _bar_text(index: int, number: int) -> str:
    if index == 0:
        return f"{number:,} elements: less than 1e-8 of B's"
    if index == len(_LABELS) - 1:
        return f"{number:,} elements: 10 times B's or more"
    return f"{number:,} elements: 1e{index - 9} to 1e{index - 8} of B's"


def _list(title: str, names: Sequence[str]) -> str:
    items = "".join(f"<li><code>{name_text(name)}</code></li>" for name in names[:_LISTED])
    more = f"<li>and {len(names) - _LISTED:,} more</li>" if len(names) > _LISTED else ""
    return f'<details class="list"><summary><h2>{title} ({len(names):,})</h2></summary><ul>{items}{more}</ul></details>'


def _added(many: Sequence[Sequence[int]] | Iterator[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(one for one in many if one), strict=True)))


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.2g}"


_STYLE = """
.same, .none { color: var(--dim); } .cards .none b { color: inherit; font-weight: 400; }
.cards .changed b { color: var(--mark); } .cards .lone b { color: var(--warn); }
figure { margin: 0; } figcaption { font-size: .85rem; color: var(--dim); margin-top: .4rem; }
.chart { display: flex; gap: 3px; height: 11rem; padding: 0; margin: 0; list-style: none; max-width: 44rem; }
.chart li { flex: 1; display: flex; flex-direction: column; justify-content: flex-end; text-align: center;
  min-width: 0; }
.chart b { background: var(--mark); border-radius: 3px 3px 0 0; min-height: 0; }
.chart span { white-space: nowrap; font-size: .75rem; color: var(--dim); border-top: 1px solid var(--line);
  padding-top: .2rem; }
.chart em { font-size: .75rem; font-style: normal; color: var(--dim); white-space: nowrap; }
.chart sup { font-size: .75em; line-height: 1; }
.row { grid-template-columns: minmax(0, 1fr) 11rem 5rem 7rem 7rem; }
.list h2 { display: inline-block; margin: .4rem 0; }
svg { fill: var(--mark); display: block; margin-left: auto; }
@container (max-width: 46rem) { .row svg { margin: 0; } }
@container (max-width: 40rem) { .chart em, .chart span { font-size: .65rem; } }
"""
