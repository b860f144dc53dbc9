"""Runs headless Chromium, for tests of pages and for pictures of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["DARK", "run"]

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
        [found, *FLAGS, profile, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout
