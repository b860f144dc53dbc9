"""The built site in headless Chromium: at the width of a laptop no page and no table is wider than its place."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.doc_pages import ROOT
from tests.pages.browser import found_in

WIDTHS = (1400, 1100)
# What each page tells the one that holds it, and what that one keeps.
LOOK = """<script>
addEventListener("load", () => {
  const page = document.documentElement;
  const tables = [...document.querySelectorAll("article table")].map(table => [
    table.innerText.slice(0, 60), table.parentElement.scrollWidth - table.parentElement.clientWidth]);
  parent.postMessage([location.pathname, innerWidth, page.scrollWidth - page.clientWidth, tables], "*");
});
</script>"""
KEEP = """
const told = [];
addEventListener("message", message => {
  told.push(message.data);
  document.getElementById("found").textContent = JSON.stringify(told);
});
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the site: `nox -s docs` builds it at the same path, and Sphinx builds again what has changed."""
    target = tmp_path_factory.mktemp("site") / "html"
    built = ROOT / "docs" / "_build" / "html"
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-b", "html", "docs", str(built)], cwd=ROOT, check=True)
    shutil.copytree(built, target)
    return target


@pytest.mark.timeout(600)
def test_pages_and_tables_fit(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    pages = [path for source in sources if (path := site / source).exists()]
    for path in pages:
        path.write_text(path.read_text(encoding="utf-8").replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
    frames = [
        f'<iframe style="width:{width}px;height:1000px;border:0" src="{path.as_uri()}"></iframe>'
        for width in WIDTHS
        for path in pages
    ]
    told = found_in(frames, KEEP, site / "host.html")
    assert len(pages) > 40
    assert {(path, width) for path, width, _, _ in told} == {(str(path), width) for path in pages for width in WIDTHS}
    wide = {}
    for path, width, excess, tables in told:
        if excess > 0 or (tables := [name for name, more in tables if more > 1]):
            wide[path, width] = excess, tables
    assert wide == {}
