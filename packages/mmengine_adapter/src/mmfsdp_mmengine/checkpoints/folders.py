"""Lists the checkpoints in a directory of a run, on a disk or in a store, and renames those that are damaged."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path
from typing import Protocol

from mmfsdp.saving import Store, names_of_damaged, open_store

__all__ = ["Folder", "folder_of", "open_folder", "series"]

_SUFFIXES = (".pth", ".pt")
_NUMBER = re.compile(r"\d+")


class Folder(Protocol):
    """A directory. Not collective: for one rank."""

    def names(self) -> list[str]:
        """Return the names of the checkpoints, complete or not."""

    def path(self, name: str) -> str:
        """Return the path or URL of a checkpoint."""

    def set_aside(self, name: str) -> str:
        """Rename a damaged checkpoint, and return its new name: ``epoch_3.pth.damaged``."""


def open_folder(place: str) -> Folder:
    """Return the directory at a path or URL; it need not exist."""
    store = open_store(place)
    return _OnDisk(Path(place)) if store is None else _InStore(place.rstrip("/"), store)


def folder_of(checkpoint: str) -> str:
    """Return the directory that a checkpoint is in."""
    return os.path.dirname(checkpoint) or "."


def series(folder: Folder) -> list[list[str]]:
    """Return the checkpoints of a directory by series, whose names differ in numbers alone, the highest numbers first.

    Numbers and not times decide on what is newest, as the clocks of hosts may differ.
    """

    def kind(name: str) -> str:
        return _NUMBER.sub("#", name)

    def order(name: str) -> list[int]:
        return [int(number) for number in _NUMBER.findall(name)]

    return [
        [folder.path(name) for name in sorted(names, key=order, reverse=True)]
        for _, names in groupby(sorted(folder.names(), key=kind), kind)
    ]


class _OnDisk:
    def __init__(self, place: Path) -> None:
        self._place = place

    def names(self) -> list[str]:
        names = os.listdir(self._place) if self._place.is_dir() else []
        return [name for name in names if name.endswith(_SUFFIXES) and not name.startswith(".")]

    def path(self, name: str) -> str:
        return str(self._place / name)

    def set_aside(self, name: str) -> str:
        names = names_of_damaged(name)
        target = next(new for new in names if not os.path.lexists(self._place / new))
        os.rename(self._place / name, self._place / target)
        return target


class _InStore:
    def __init__(self, url: str, store: Store) -> None:
        self._url, self._store = url, store

    def names(self) -> list[str]:
        return [name for name in self._store.names() if name.endswith(_SUFFIXES) and self._store.is_complete(name)]

    def path(self, name: str) -> str:
        return f"{self._url}/{name}"

    def set_aside(self, name: str) -> str:
        taken = self._store.names()
        target = next(new for new in names_of_damaged(name) if new not in taken)
        self._store.move(name, target)
        return target
