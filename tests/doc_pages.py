"""The fenced blocks of README.md, CONTRIBUTING.md and docs/, and the scripts that tests make from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks", "name", "outputs", "script_of"]

ROOT = Path(__file__).parent.parent
_DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
PAGES = [ROOT / "README.md", *(path for path in [ROOT / "CONTRIBUTING.md"] if path.exists()), *_DOCS]
_FENCE = re.compile(
    r"(?:^<!-- (?P<kind>illustrative|from): (?P<detail>[^\n]*) -->\n)?"
    r"^```(?P<language>[\w+-]+)[^\n]*\n(?P<text>.*?)^```[ ]*$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: The word after the fence.
        line: The number of its first line of text, counted from 1.
        text: What stands between the fences.
        source: The file that it is a part of, from a comment `<!-- from: PATH -->` above it.
        illustrative: Why it is neither run nor compared, from a comment `<!-- illustrative: WHY -->` above it.
    """

    language: str
    line: int
    text: str
    source: str | None = None
    illustrative: str | None = None

    @property
    def runs(self) -> bool:
        """Whether tests run it."""
        return self.language in ("python", "console") and self.source is None and self.illustrative is None


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        details = {match["kind"]: match["detail"]}
        found.append(Block(match["language"], line, match["text"], details.get("from"), details.get("illustrative")))
    return found


def name(page: Path) -> str:
    """Return a page's path in the repository."""
    return str(page.relative_to(ROOT))


def script_of(page: Path) -> str:
    """Return a page as one script, each line of code at the line where the page has it.

    After each Python block it prints a mark, so that the output of the block can be compared with the text block that
    follows. Console blocks are checked where they stand.
    """
    lines = [""] * (page.read_text(encoding="utf-8").count("\n") + 2)
    for block in blocks(page):
        if not block.runs:
            continue
        code = block.text.splitlines()
        if block.language == "python":
            lines[block.line - 1 : block.line - 1 + len(code)] = code
            lines[block.line - 1 + len(code)] = f'if __name__ == "__main__": print({_mark(block)!r}, flush=True)'
        else:
            lines[block.line - 1] = f'if __name__ == "__main__": __import__("console_blocks").check({block.text!r})'
    return "\n".join(lines)


def _mark(block: Block) -> str:
    """Return the line that a script prints after a block."""
    return f"--- end of the block at line {block.line} ---"


def outputs(page: Path, printed: str) -> dict[int, str]:
    """Return what each Python block of a page printed, by the line of the block."""
    found = {}
    for block in blocks(page):
        if block.runs and block.language == "python":
            own, _, printed = printed.partition(_mark(block) + "\n")
            found[block.line] = own
    return found
