"""Runs headless Chromium, for tests of pages and for pictures of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import Any

__all__ = ["DARK", "found_in", "run"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=4000",
)
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


def run(page: Path, *flags: str) -> str:
    """Open a page in a fresh profile beside it, and return what Chromium prints."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, f"None of {', '.join(NAMES)} is on PATH. Install Chromium: apt-get install chromium."
    profile = f"--user-data-dir={page.parent / f'profile_{page.stem}'}"
    done = subprocess.run(
        [found, *FLAGS, profile, *flags, page.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def found_in(frames: Iterable[str], script: str, host: Path) -> Any:
    """Write a page that holds frames, and return what its script puts as JSON into the element ``found``.

    A start of Chromium takes longer than most frames do, so one should open them all. A frame is as a window of its
    size is, and its style ``color-scheme: dark`` is to what it holds what a dark theme is.
    """
    host.write_text(f'<!doctype html><pre id="found"></pre><script>{script}</script>{"".join(frames)}', "utf-8")
    found = re.search(r'<pre id="found">(.+?)</pre>', run(host, "--dump-dom"), flags=re.DOTALL)
    assert found is not None, "The script found nothing."
    return json.loads(unescape(found[1]))
