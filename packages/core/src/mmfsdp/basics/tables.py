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
    """A column of a table."""

    title: str
    right: bool = False
    """Align to the right, as numbers are."""
    wraps: bool = False
    """Cells may continue on another line where the table would be too wide."""
    once: bool = False
    """Say what the column holds below the table, where that is the same in all rows and the table would be too wide."""
    rank: int = 0
    """Columns with a rank above 0 are left out, the highest first, where wrapping is not enough."""


def format_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table: titles, a rule, the rows, and what was left out.

    Args:
        columns: The columns.
        rows: A cell of each column for every row, without line breaks.
        width: Characters that a line may have, where possible; None for as many as it takes.
    """
    places = [*range(len(columns))]
    natural = [max([display_width(row[place]) for row in rows] + [len(columns[place].title)]) for place in places]
    widths = dict(enumerate(natural))
    same: list[str] = []
    left_out: list[str] = []
    if width is not None:
        for place in [*places] if _too_wide(widths, places, width) and len(rows) > 1 else []:
            if columns[place].once and len({row[place] for row in rows}) == 1:
                places.remove(place)
                same.append(f"{columns[place].title} {rows[0][place]}")
        while (narrowed := _narrowed(columns, natural, places, width)) is None:
            least = max(places, key=lambda place: columns[place].rank)
            places.remove(least)
            left_out.insert(0, columns[least].title)
        widths = narrowed
    titles = [columns[place].title for place in places]
    rule = _GAP.join("-" * widths[place] for place in places)
    lines = [*_row(columns, titles, places, widths), rule]
    for row in rows:
        lines += _row(columns, [row[place] for place in places], places, widths)
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


def _too_wide(widths: dict[int, int], places: list[int], width: int) -> int:
    """Return by how many characters the columns are too wide, or 0."""
    return max(sum(widths[place] for place in places) + len(_GAP) * (len(places) - 1) - width, 0)


def _narrowed(columns: Sequence[Column], natural: list[int], places: list[int], width: int) -> dict[int, int] | None:
    """Return widths that fit, or None if a column must be left out first."""
    widths = {place: natural[place] for place in places}
    for _ in range(_too_wide(widths, places, width)):
        room = {p: widths[p] - max(_NARROWEST, len(columns[p].title)) for p in places if columns[p].wraps}
        widest = max(room, key=lambda place: (room[place] > 0, widths[place]), default=None)
        if widest is None or room[widest] <= 0:
            return None if any(columns[place].rank for place in places) else widths
        widths[widest] -= 1
    return widths


def _row(columns: Sequence[Column], cells: list[str], places: list[int], widths: dict[int, int]) -> Iterator[str]:
    parts = [
        [*wrap_cell(cell, widths[place])] if display_width(cell) > widths[place] else [cell]
        for cell, place in zip(cells, places, strict=True)
    ]
    for line in range(max(map(len, parts))):
        shown = []
        for part, place in zip(parts, places, strict=True):
            text = part[line] if line < len(part) else ""
            space = " " * (widths[place] - display_width(text))
            shown.append(space + text if columns[place].right else text + space)
        yield _GAP.join(shown).rstrip()
