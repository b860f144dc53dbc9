"""Draws the badges of README.md into docs/images, from what the repository itself says: ``python tools/badges.py``."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

__all__ = ["BADGES", "count_tests", "drawn", "path_of"]

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
_CHARACTER = 6.8  # its width in pixels
_STEP = 100  # tests are counted in hundreds, so that a new one does not change the badge


def count_tests() -> int:
    """Return the number of test functions; most run with several parameters."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py"))
    found = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(isinstance(node, found) and node.name.startswith("test_") for tree in trees for node in ast.walk(tree))


def _coverage() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return int(settings["tool"]["coverage"]["report"]["fail_under"])


def _license() -> str:
    name, version, *_ = (line.strip() for line in (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines() if line)
    return f"{name.removesuffix(' License')} {version.removeprefix('Version ').partition(',')[0]}"


BADGES = {
    "tests": lambda: f"more than {count_tests() // _STEP * _STEP:,}",
    "coverage": lambda: f"at least {_coverage()} %",
    "license": _license,
}
"""For each badge what it says on its right side."""


def path_of(badge: str) -> Path:
    """Return the file of a badge."""
    return IMAGES / f"badge_{badge}.svg"


def drawn(badge: str) -> str:
    """Return a badge."""
    said = BADGES[badge]()
    left, right = (round(_CHARACTER * len(text) + 14) for text in (badge, said))
    text = '<text x="{x}" y="15" text-anchor="middle">{said}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="22" role="img">\n'
        f"<title>{badge}: {said}</title>\n"
        f'<rect width="{left + right}" height="22" rx="4" fill="#44505c"/>\n'
        f'<path d="M{left} 0h{right - 4}a4 4 0 0 1 4 4v14a4 4 0 0 1-4 4h-{right - 4}z" fill="#1f6feb"/>\n'
        f'<g font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#fff">'
        f"{text.format(x=left / 2, said=badge)}{text.format(x=left + right / 2, said=said)}</g>\n</svg>\n"
    )


if __name__ == "__main__":
    for badge in BADGES:
        path_of(badge).write_text(drawn(badge), encoding="utf-8")
