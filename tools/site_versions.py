"""Adds a built site to the folder that holds the sites of all versions, for .github/workflows/docs.yml.

    python tools/site_versions.py docs/_build/html site v0.1.0

The folder gets one folder per version, `latest` for what is on main; `versions.json`, from which
docs/static/versions.js makes the choice of versions; and an `index.html` and `llms.txt` that lead to the newest
release.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from packaging.version import Version

__all__ = ["add_version"]

LATEST = "latest"
REDIRECT = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>mmfsdp</title>
<meta http-equiv="refresh" content="0; url={0}/">
<link rel="canonical" href="{0}/">
<p>The documentation is at <a href="{0}/">{0}</a>.</p>
</html>
"""


def add_version(built: Path, site: Path, version: str) -> None:
    """Replace the pages of one version, and list all versions.

    Args:
        built: The built site.
        site: The folder of all versions. It may be empty.
        version: A tag such as ``v0.1.0``, or ``latest``.

    Raises:
        packaging.version.InvalidVersion: The tag is not a version.
    """
    if version != LATEST:
        Version(version)
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(built, site / version, ignore=shutil.ignore_patterns(".*"))
    names = [path.name for path in site.iterdir() if (path / "index.html").exists()]
    releases = sorted({*names} - {LATEST}, key=Version, reverse=True)
    first = next((name for name in releases if not Version(name).is_prerelease), LATEST if LATEST in names else version)
    (site / "versions.json").write_text(json.dumps([*[LATEST] * (LATEST in names), *releases]))
    (site / "index.html").write_text(REDIRECT.format(first))
    pages = (site / first / "llms.txt").read_text(encoding="utf-8")
    (site / "llms.txt").write_text(re.sub(r"\]\((?=_sources/)", f"]({first}/", pages), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("Give the built site, the folder of all versions, and a version such as v0.1.0 or latest.")
    add_version(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
