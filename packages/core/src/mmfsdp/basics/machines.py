"""Tells machines apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["boot_id"]


@cache
def boot_id() -> str | None:
    """Return what identifies this machine since it was started, its containers included; None where it is not known.

    Linux alone tells, and a sandbox may hide it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
