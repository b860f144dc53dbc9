"""Lists the formats that can be read and written, from the readers and writers that there are."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

from mmfsdp.checkpoint.formats import detect
from mmfsdp.checkpoint.formats.targets import TARGETS

__all__ = ["FormatInfo", "known_formats"]

_FUNCTION = re.compile(r"Read the layout of (.+?)\.(?:\s|$)", re.DOTALL)
_MODULE = re.compile(r"Reads (?:the )?([^:\n]+)")


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format of checkpoints."""

    name: str
    """Its name."""
    what: str
    """What it is, in a few words."""
    reads: bool
    """Whether ``open_layout`` reads it. Whatever can be read can be converted to whatever can be written."""
    writes: bool
    """Whether ``convert`` writes it."""
    suffixes: tuple[str, ...]
    """Suffixes of a target that ask for it."""
    spellings: tuple[str, ...]
    """What ``to=`` calls it."""

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def known_formats() -> list[FormatInfo]:
    """Return the formats, those that can be written first."""
    # The functions that open_layout() chooses from, and what each, or the module that it has to itself, says of it.
    found = {}
    for name, function in inspect.getmembers(detect, inspect.isfunction):
        said = _FUNCTION.match(inspect.getdoc(function) or "")
        if name.startswith("read_") and said:
            found[name.removeprefix("read_")] = function, said[1]
    readers: dict[str, str] = {}
    modules = [function.__module__ for function, _ in found.values()]
    for name, (function, said_here) in found.items():
        said = _MODULE.match(sys.modules[function.__module__].__doc__ or "")
        text = said[1].rstrip(".") if said and modules.count(function.__module__) == 1 else said_here
        readers[name] = " ".join(text.replace("``", "").split())
    written = [
        FormatInfo(target.format, target.what, target.format in readers, True, target.suffixes, target.spellings)
        for target in TARGETS
    ]
    taken = {info.name for info in written}
    only_read = [FormatInfo(name, what, True, False, (), ()) for name, what in readers.items() if name not in taken]
    return [*written, *only_read]
