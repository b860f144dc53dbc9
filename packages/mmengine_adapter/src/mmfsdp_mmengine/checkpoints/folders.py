"""Lists the checkpoints in the directory of a run, on a disk or in a store."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

from mmfsdp.saving import Store, open_directory

__all__ = ["folder_of", "is_checkpoint", "series"]

_SUFFIXES = (".pth", ".pt")
_NUMBER = re.compile(r"\d+")


def folder_of(checkpoint: str) -> str:
    """Return the directory that a checkpoint is in."""
    return os.path.dirname(checkpoint) or "."


def is_checkpoint(name: str) -> bool:
    """Tell by its name whether something in the directory of a run is a checkpoint, complete or not."""
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def series(directory: str) -> list[list[str]]:
    """Return the checkpoints in a directory by series, whose names differ in numbers alone, the highest numbers first.

    Numbers, not times, decide which is newest, because the clocks of hosts may differ. Not collective.

    Args:
        directory: A path or URL; there need not be anything.
    """

    def kind(name: str) -> str:
        return _NUMBER.sub("#", name)

    def order(name: str) -> list[int]:
        return [int(number) for number in _NUMBER.findall(name)]

    files = open_directory(directory)

    def path(name: str) -> str:
        return f"{directory.rstrip('/')}/{name}" if isinstance(files, Store) else str(Path(directory, name))

    return [
        [path(name) for name in sorted(names, key=order, reverse=True)]
        for _, names in groupby(sorted(files.checkpoints(is_checkpoint), key=kind), kind)
    ]
