"""Changes of the settings that lower the peak of a step, each with the bytes that it saves. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmfsdp.basics.text import human_bytes

__all__ = ["Saving", "savings_text"]


@dataclass(frozen=True)
class Saving:
    """One change and the bytes by which the peak falls if nothing else changes."""

    nbytes: int
    """Bytes between the two peaks."""
    what: str
    """The change, for people to read."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sections to write in place of those in the settings; empty if the change is not one of settings."""
    elsewhere: str = ""
    """A change outside of the settings, such as an argument of the optimizer."""
    source: str = "rehearsed"
    """``rehearsed``: the changed step was rehearsed; ``derived``: its record was computed from the step's."""

    @property
    def write(self) -> str:
        """The lines to write, ready to paste: settings as YAML, one section a line, or the change elsewhere."""
        return "\n".join(f"{name}: {json.dumps(value)}" for name, value in self.settings.items()) or self.elsewhere

    def describe(self) -> dict[str, Any]:
        """Return plain values only."""
        return {**asdict(self), "settings": dict(self.settings)}


def savings_text(savings: Sequence[Saving]) -> list[str]:
    """Return lines that name each change, with what to write below it."""
    if not savings:
        return []
    lines = ["What lowers the peak most, each change on its own:"]
    for saving in savings:
        how = "" if saving.source == "rehearsed" else f" ({saving.source})"
        lines += ["", f"{human_bytes(saving.nbytes)} less with {saving.what}{how}:"]
        lines += [f"    {line}" for line in saving.write.splitlines()]
    return lines
