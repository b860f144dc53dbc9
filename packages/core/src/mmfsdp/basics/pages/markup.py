"""Writes pieces of HTML: text that is safe whatever it holds, exact sizes, tables, trees and sections."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from mmfsdp.basics.text import human_bytes

__all__ = [
    "bar",
    "branch",
    "exact",
    "head_row",
    "json_data",
    "label",
    "name_text",
    "row",
    "section",
    "share",
    "signed",
    "size",
    "table",
    "text",
    "verdict",
]

_JOINTS = re.compile(r"(?<=[A-Za-z_\])}])([._/])(?=[\w{*])|(?<=\d)([._/])(?=[A-Za-z_{*])")
"""Where names break: not in a number such as 0.25, nor in a range such as {0..11}."""


def text(value: object) -> str:
    """Return any value as text that is safe in HTML and in its attributes."""
    return escape(str(value))


def name_text(value: object) -> str:
    """Return text as `text` does, whose names and paths break only after dots, slashes and underscores."""
    return _JOINTS.sub(r"\g<0><wbr>", text(value))


def size(nbytes: int) -> str:
    """Return bytes with a binary unit. Programs read the exact number, and a pointer over it shows it."""
    return f'<data value="{nbytes}" title="{nbytes:,} bytes">{human_bytes(nbytes)}</data>'


def signed(nbytes: int) -> str:
    """Return a difference in bytes with its sign."""
    sign = "" if not nbytes else "+" if nbytes > 0 else "\u2212"
    return f'<data value="{nbytes}" title="{nbytes:,} bytes">{sign}{human_bytes(abs(nbytes))}</data>'


def exact(nbytes: int) -> str:
    """Return bytes with a binary unit and the exact number, as plain text."""
    return human_bytes(nbytes) if nbytes < 1024 else f"{human_bytes(nbytes)} ({nbytes:,} bytes)"


def share(part: float, whole: float) -> str:
    """Return a part of a whole in percent."""
    percent = 100 * part / whole if whole else 0.0
    shown = "<0.1" if 0 < percent < 0.1 else f"{percent:.1f}" if 0 < percent < 100 else f"{percent:.0f}"
    return f"{shown}\u00a0%"


def table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1) -> str:
    """Return a table.

    Args:
        caption: What the table shows, as text.
        titles: The titles of the columns, as text.
        rows: Cells, as HTML; the first of a row is its header.
        names: How many columns on the left are text; the others are numbers.
    """
    kinds = [""] * names + ["num"] * (len(titles) - names)
    head = "".join(
        f'<th scope="col"{_class(kind)}>{name_text(title)}</th>' for title, kind in zip(titles, kinds, strict=True)
    )
    body = []
    for first, *others in rows:
        cells = "".join(f"<td{_class(kind)}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True))
        body.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<div class="wide"><table><caption>{name_text(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def verdict(state: str, title: str, *below: str) -> str:
    """Return the head of a page, which begins with what it has found.

    Args:
        state: ``good`` or ``bad``; empty if it is neither.
        title: The verdict, as HTML.
        below: What the page is about, as HTML.
    """
    return f'<header class="{state}"><h1>{title}</h1>{"".join(below)}</header>'


def head_row(*titles: str) -> str:
    """Return the titles, as text, above the rows of a tree. Narrow pages and screen readers have `label` in place."""
    cells = "".join(f"<span>{text(title)}</span>" for title in titles)
    return f'<div class="row head" aria-hidden="true">{cells}</div>'


def label(title: str) -> str:
    """Return what a cell of a tree shows, as text, for readers who do not see the titles above."""
    return f'<small class="label">{text(title)} </small>'


def row(cells: str) -> str:
    """Return a row that has nothing below it, whose cells are HTML."""
    return f'<div class="row">{cells}</div>'


def branch(cells: str, below: Iterable[str], *, is_open: bool) -> str:
    """Return a row that opens and closes the rows below it."""
    state = " open" if is_open else ""
    return f'<details{state}><summary class="row">{cells}</summary>{"".join(below)}</details>'


def bar(percent: float) -> str:
    """Return a bar that is filled in part; it stands beside the number that it shows."""
    return f'<i aria-hidden="true"><b style="width:{percent:.1f}%"></b></i> '


def section(identifier: str, title: str, *parts: str) -> str:
    """Return a section with a heading that links can name."""
    return f'<section aria-labelledby="{identifier}"><h2 id="{identifier}">{text(title)}</h2>{"".join(parts)}</section>'


def json_data(identifier: str, value: Any) -> str:
    """Return plain data for the page's script, under an id."""
    found = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{identifier}">{found}</script>'


def _class(kind: str) -> str:
    return ' class="num"' if kind == "num" else ""
