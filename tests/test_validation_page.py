"""docs/explanation/validation.md is what its script writes, and its commands name what exists."""

from __future__ import annotations

import re

from tests.doc_pages import ROOT
from tools.validation import AGREEMENT, FAMILIES, PAGE, TESTS, page


def without_figures(text: str) -> str:
    """Return a page without numbers: those change with each run of the benchmarks."""
    return re.sub(r"\d[\d.,e%-]*", "#", text)


def test_the_page_is_up_to_date() -> None:
    assert without_figures(page()) == without_figures(PAGE.read_text(encoding="utf-8")), (
        "run: python tools/validation.py"
    )


def test_every_family_has_its_row() -> None:
    text = (ROOT / "tests" / "models" / "families.py").read_text(encoding="utf-8")
    built = re.findall(r'"architecture": "(\w+)"', text)
    assert built
    assert [name for name in built if not any(name in told for told, _ in FAMILIES.values())] == []
    assert len(AGREEMENT.read_text(encoding="utf-8").splitlines()) == 3 * len(FAMILIES) + 8


def test_its_commands_exist() -> None:
    sessions = {*re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)}
    for _, command in (row for rows in TESTS.values() for row in rows):
        tool, *words = command.split()
        if tool == "nox":
            assert words[1] in sessions, command
        elif tool == "pytest":
            assert [word for word in words if not (ROOT / word).is_file()] == [], command
        else:
            assert (ROOT / f"{words[1].replace('.', '/')}.py").is_file(), command
