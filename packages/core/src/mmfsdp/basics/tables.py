"""Aligned text tables that fit a given width: long cells are wrapped between words, and columns can be left out."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Column", "display_width", "format_table", "wrap_cell"]

_GAP = "  "
_NARROWEST = 10
_WORDS = re.compile(r"\S+\s*|\s+")
_PARTS = re.compile(r"[^./_-]+[./_-]*\s*|[./_-]+\s*|\s+")  # pieces of a word that is too long for a line


@dataclass(frozen=True)
class Column:
    """A column of a table of `format_table`."""

    title: str
    right: bool = False
    """Align to the right, as numbers are."""
    wraps: bool = False
    """Cells may continue on another line where the table would be too wide."""
    once: bool = False
    """State the column's value below the table if it is the same in all rows and the table would be too wide."""
    rank: int = 0
    """Columns with a rank above 0 are left out, the highest first, where wrapping is not enough."""


def format_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table: titles, a rule, the rows, and what was left out.

    Args:
        columns: The columns.
        rows: A cell of each column for every row, without line breaks.
        width: Characters that a line may have, where possible; None for as many as it takes.
    """
    indices = [*range(len(columns))]
    natural = [max([display_width(row[index]) for row in rows] + [len(columns[index].title)]) for index in indices]
    widths = dict(enumerate(natural))
    same: list[str] = []
    left_out: list[str] = []
    if width is not None:
        for index in [*indices] if _too_wide(widths, indices, width) and len(rows) > 1 else []:
            if columns[index].once and len({row[index] for row in rows}) == 1:
                indices.remove(index)
                same.append(f"{columns[index].title} {rows[0][index]}")
        while (narrowed := _narrowed(columns, natural, indices, width)) is None:
            least = max(indices, key=lambda index: columns[index].rank)
            indices.remove(least)
            left_out.insert(0, columns[least].title)
        widths = narrowed
    titles = [columns[index].title for index in indices]
    rule = _GAP.join("-" * widths[index] for index in indices)
    lines = [*_row(columns, titles, indices, widths), rule]
    for row in rows:
        lines += _row(columns, [row[index] for index in indices], indices, widths)
    if same:
        lines.append(f"(in every row: {', '.join(same)})")
    if left_out:
        lines.append(f"(not shown in {width} columns: {', '.join(left_out)})")
    return lines


def display_width(text: str) -> int:
    """Return how many columns of a terminal a text takes; Chinese and Japanese characters take two."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def wrap_cell(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a cell, broken at spaces; longer words after a dot, slash or dash, or else anywhere."""
    line = ""
    atoms = [
        atom
        for word in _WORDS.findall(text)
        for atom in ([word] if display_width(word.rstrip()) <= width else _PARTS.findall(word))
    ]
    for atom in atoms:
        if line and display_width(line + atom.rstrip()) > width:
            yield line.rstrip()
            line = ""
        while display_width(line + atom.rstrip()) > width:
            cut = next(n for n in range(len(atom), 0, -1) if n == 1 or display_width(atom[:n]) <= width)
            yield atom[:cut]
            atom = atom[cut:]
        line += atom
    yield line.rstrip()


def _too_wide(widths: dict[int, int], indices: list[int], width: int) -> int:
    """Return by how many characters the columns are too wide, or 0."""
    return max(sum(widths[index] for index in indices) + len(_GAP) * (len(indices) - 1) - width, 0)


def _narrowed(columns: Sequence[Column], natural: list[int], indices: list[int], width: int) -> dict[int, int] | None:
    """Return widths that fit, or None if a column must be left out first."""
    widths = {index: natural[index] for index in indices}
    for _ in range(_too_wide(widths, indices, width)):
        room = {p: widths[p] - max(_NARROWEST, len(columns[p].title)) for p in indices if columns[p].wraps}
        widest = max(room, key=lambda index: (room[index] > 0, widths[index]), default=None)
        if widest is None or room[widest] <= 0:
            return None if any(columns[index].rank for index in indices) else widths
        widths[widest] -= 1
    return widths


def _row(columns: Sequence[Column], cells: list[str], indices: list[int], widths: dict[int, int]) -> Iterator[str]:
    parts = [
        [*wrap_cell(cell, widths[index])] if display_width(cell) > widths[index] else [cell]
        for cell, index in zip(cells, indices, strict=True)
    ]
    for line in range(max(map(len, parts))):
        shown = []
        for part, index in zip(parts, indices, strict=True):
            text = part[line] if line < len(part) else ""
            space = " " * (widths[index] - display_width(text))
            shown.append(space + text if columns[index].right else text + space)
        yield _GAP.join(shown).rstrip()
