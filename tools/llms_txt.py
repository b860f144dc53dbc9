"""Writes llms.txt, the list of all pages with what each is about, for readers that are programs: docs/conf.py calls it.

Its form is that of https://llmstxt.org. Links lead to the Markdown of the pages, which the site has under `_sources`.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["llms_txt"]


def llms_txt(docs: Path) -> str:
    """Return the list of pages, in the order of the sidebar.

    Args:
        docs: The folder with ``index.md``, whose lists of pages are the sidebar.
    """
    index = (docs / "index.md").read_text(encoding="utf-8")
    title, summary = _beginning(index)
    lines = [f"# {title}\n\n> {summary}\n"]
    for options, pages in re.findall(r"^```\{toctree\}\n((?::[^\n]*\n)*)\n?(.*?)^```", index, re.MULTILINE | re.DOTALL):
        caption = re.search(r":caption: (.*)", options)
        lines.append(f"\n## {caption[1] if caption else 'Pages'}\n\n")
        for page in pages.split():
            name, about = _beginning((docs / f"{page}.md").read_text(encoding="utf-8"))
            lines.append(f"- [{name}](_sources/{page}.md.txt): {_sentence(about)}\n")
    return "".join(lines)


def _beginning(text: str) -> tuple[str, str]:
    """Return the title of a page and its first paragraph, as plain text in one line."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.MULTILINE | re.DOTALL)
    title, paragraph, *_ = (part.strip() for part in text.split("\n\n", 2))
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return title.removeprefix("# "), " ".join(plain.split())


def _sentence(text: str) -> str:
    return re.split(r"(?<=[.!?]) (?=[A-Z`*]|mmfsdp)", text, maxsplit=1)[0]
