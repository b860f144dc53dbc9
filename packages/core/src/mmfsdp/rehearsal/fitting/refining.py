"""Lists choices close to one whose step does not fit: finer units, and units that backward gathers later. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from mmfsdp.rehearsal.fitting.candidates import Choice
from mmfsdp.rehearsal.fitting.changes import changes_of
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["REFINED", "refined"]

REFINED = frozenset(("wrap", "prefetch"))
"""Sections that are varied around single choices only, because every combination would multiply the search."""


def refined(choice: Choice, step: Rehearsal, sections: Collection[str], missing: int = 0) -> Iterator[Choice]:
    """Yield choices whose steps hold less of what is gathered at the peak: each change alone, then all together.

    Args:
        choice: The choice.
        step: Its step.
        sections: Sections of the settings that may be changed, of `REFINED`.
        missing: Bytes that a change must concern.
    """
    changes = [
        change
        for change in changes_of(step, choice.settings, 1, wraps="wrap" in sections)
        if change.settings and set(change.settings) <= set(sections)
    ]
    together: dict[str, Any] = {}
    for change in changes:
        together = {**change.settings, **together}  # the first of a section concerns most
        if change.concerns >= missing:
            yield replace(choice, settings={**choice.settings, **change.settings})
    if len(together) > 1 and sum(change.concerns for change in changes) >= missing:
        yield replace(choice, settings={**choice.settings, **together})
