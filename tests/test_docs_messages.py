"""Pages that quote messages in tables quote those that the packages raise."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest
from tests.doc_pages import ROOT

from mmfsdp.checkpoint import known_formats, known_recipes

PAGES = [ROOT / "docs" / "howto" / name for name in ("troubleshooting.md", "get_weights.md")]
_TABLE = r"^\| (?:the )?message \|.*?(?=\n\n)"
_ROWS = [
    line.split("|")[1].strip(" `")
    for page in PAGES
    for table in re.findall(_TABLE, page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for line in table.splitlines()[2:]
]


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield every text of a module; a gap stands for what an f-string fills in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def sources() -> str:
    files = sorted((ROOT / "packages").glob("*/src/**/*.py"))
    return "\n".join(text for path in files for text in texts(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("message", _ROWS)
def test_message_exists(message: str) -> None:
    parts = [re.escape(part) for part in re.split(r"\s*\.\.\.,?\s*", message) if part]
    assert parts
    assert re.search(r"[^\n]*?".join(parts), sources()), f"no message says {message!r}"


def test_the_page_of_formats_lists_each() -> None:
    text = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` ?(?:\((.*?)\))? \|", text, flags=re.MULTILINE))
    assert {*listed} == {info.name for info in known_formats()}
    for info in known_formats():
        assert listed[info.name].startswith("written, not read") == (not info.reads)
        assert ("written" in listed[info.name]) == info.writes
        assert info.aliases[:1] == tuple(re.findall("as `(.*)`", listed[info.name]))


def test_the_page_of_recipes_names_each() -> None:
    text = (ROOT / "docs" / "howto" / "recipes.md").read_text(encoding="utf-8")
    assert [info.name for info in known_recipes() if f"`{info.name}`" not in text] == []
