"""Keeps the record of the last few steps in memory, and writes it when something goes wrong."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.parity.figures import Figures
from mmfsdp.parity.records import Entry, Key, entry_of, file_of
from mmfsdp.parity.writing import Writer

__all__ = ["Ring"]

_FOLLOWED = ("input", "output", "gradient of output", "gradient before clipping", "gradient")
_Name = tuple[str, str, int]


class Ring(Writer):
    """A writer that writes nothing until `dump` is called.

    Args:
        folder: Not used.
        rank: This rank.
        head: What the run is.
        keep: How many recorded steps to keep.
    """

    def __init__(self, folder: Path, rank: int, head: Mapping[str, Any], keep: int) -> None:
        self._steps: deque[str] = deque(maxlen=keep)
        super().__init__(folder, rank, head)

    @property
    def is_dumping(self) -> bool:
        """Whether what is recorded goes to a file."""
        return self._file is not None

    def dump(self, folder: Path) -> None:
        """Write the steps that are kept, and from now on all others, to a folder."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = file_of(folder, self._rank).open("w", encoding="utf-8")
        except OSError as error:
            self._stop(error)
        super()._write(self._head + "".join(self._steps))

    def finish(self) -> None:
        """End the file that `dump` began."""
        self.odd = ""
        super()._write(json.dumps({"end": True}) + "\n")
        if self._file is not None:
            self._file.close()
            self._file = None

    def origin(self, factor: float) -> tuple[Key, float, float] | None:
        """Return the first tensor of the last step whose norm is that many times its usual one, with both norms.

        Args:
            factor: How many times the median of the steps before is a jump.
        """
        *before, last = [[_entry(line) for line in text.splitlines()] for text in self._steps] or [[]]
        usual: dict[_Name, list[float]] = {}
        for entry in (entry for step in before for entry in step):
            usual.setdefault(_name(entry.key), []).append(entry.figures.norm)
        for entry in last:
            norms = usual.get(_name(entry.key))
            if entry.key.kind in _FOLLOWED and norms and _jumps(entry.figures, statistics.median(norms), factor):
                return entry.key, entry.figures.norm, statistics.median(norms)
        return None

    def close(self) -> None:
        """Write what is left, if a file is open. Steps in memory are dropped."""
        self.flush()
        if self.is_dumping:
            self.finish()

    def _open(self, folder: Path, rank: int, head: str) -> None:
        self._rank, self._head = rank, head

    def _write(self, text: str) -> None:
        self._steps.append(text)
        super()._write(text)


def _entry(line: str) -> Entry:
    return entry_of(json.loads(line))


def _name(key: Key) -> _Name:
    return key.kind, key.name, key.call


def _jumps(figures: Figures, usual: float, factor: float) -> bool:
    return bool(figures.odd) or figures.norm > factor * usual > 0
