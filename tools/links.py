"""Finds links that lead nowhere, in Markdown files as the repository shows them, and in the built site.

    python tools/links.py docs/_build/html

Links to other servers are not followed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["broken_in_markdown", "broken_in_site", "markdown_files"]

ROOT = Path(__file__).parents[1]
BESIDE = {"genindex.html", "search.html", "py-modindex.html"}  # made by Sphinx, and reached by its search field


def markdown_files() -> list[Path]:
    """Return all Markdown files of the repository."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in found.split("\0") if name and (ROOT / name).exists()]


def broken_in_markdown(path: Path) -> list[str]:
    """Return a sentence for each link of a file to a file or a heading that does not exist."""
    found = []
    text = _without_code(path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", text):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.exists():
            found.append(f"{path.relative_to(ROOT)}: {link}: there is no such file")
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in _headings(target):
            found.append(f"{path.relative_to(ROOT)}: {link}: there is no such heading")
    return found


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL))


def _headings(path: Path) -> set[str]:
    """Return the anchors of a file's headings, which GitHub and the site make in the same way."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    anchors: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{anchor}-{anchors[anchor]}" if anchors[anchor] else anchor)
        anchors[anchor] += 1
    return found


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name == "id":
                self.anchors.add(value)
            elif value and name in ("href", "src") and (tag, name) != ("link", "href"):
                self.links.append(value)


def broken_in_site(folder: Path) -> list[str]:
    """Return a sentence for each link of a built site that leads nowhere, and for each page to which none leads.

    Args:
        folder: Where ``index.html`` is.
    """
    folder = folder.resolve()
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    found, linked = [], {path: {*_targets(path, page)} for path, page in pages.items()}
    for path, targets in linked.items():
        for link, target, fragment in targets:
            if not target.exists():
                found.append(f"{path.relative_to(folder)}: {link}: there is no such file")
            elif fragment and target in pages and fragment not in pages[target].anchors:
                found.append(f"{path.relative_to(folder)}: {link}: there is no such heading")
    reached, new = set[Path](), {folder / "index.html"}
    while new:
        reached |= new
        new = {target for path in new for _, target, _ in linked[path] if target in pages} - reached
    alone = (str(path.relative_to(folder)) for path in {*pages} - reached)
    return sorted([*found, *(f"{path}: no link leads there" for path in alone if path not in BESIDE)])


def _targets(path: Path, page: _Page) -> Iterator[tuple[str, Path, str]]:
    for link in page.links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            yield link, target, unquote(parts.fragment)


if __name__ == "__main__":
    broken = [line for path in markdown_files() for line in broken_in_markdown(path)]
    broken += [line for folder in sys.argv[1:] for line in broken_in_site(Path(folder))]
    sys.exit("\n".join(broken) or None)
