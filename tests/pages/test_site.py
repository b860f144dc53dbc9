"""The built site in headless Chromium: at the width of a laptop no page and no table is wider than its place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

import pytest
from tests.doc_pages import ROOT
from tests.pages.browser import run

WIDTHS = (1400, 1100)
LOOK = """<script>
addEventListener("load", () => {
  const page = document.documentElement;
  const tables = [...document.querySelectorAll("article table")].map(table => [
    table.innerText.slice(0, 60), table.parentElement.scrollWidth - table.parentElement.clientWidth]);
  document.title = "FOUND" + JSON.stringify({page: page.scrollWidth - page.clientWidth, tables});
});
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-b", "html", "docs", str(target)], cwd=ROOT, check=True)
    return target


@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_and_tables_fit(site: Path, width: int) -> None:
    pages = [path for path in site.rglob("*.html") if path.stem not in ("genindex", "search", "py-modindex")]

    def too_wide(path: Path) -> tuple[int, list[str]] | None:
        probe = path.with_name(f"probe_{path.name}")
        probe.write_text(path.read_text(encoding="utf-8").replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
        [title] = re.findall("<title>FOUND(.*?)</title>", run(probe, f"--window-size={width},1000", "--dump-dom"))
        probe.unlink()
        found = json.loads(unescape(title))
        tables = [name for name, excess in found["tables"] if excess > 1]
        return (found["page"], tables) if found["page"] > 0 or tables else None

    with ThreadPoolExecutor(2) as pool:
        wide = {path.stem: found for path, found in zip(pages, pool.map(too_wide, pages), strict=True) if found}
    assert len(pages) > 40
    assert wide == {}
