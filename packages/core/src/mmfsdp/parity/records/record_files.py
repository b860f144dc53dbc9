"""Records on disk: lines of JSON that are only appended to, one file per rank. Reading them needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmfsdp.errors import CheckpointNotFoundError, FormatError
from mmfsdp.parity.sketching.figures import Figures

__all__ = [
    "CHANGED",
    "EACH",
    "FORM",
    "Entry",
    "Key",
    "RankRecord",
    "Spread",
    "entries_by_key",
    "entry_of",
    "file_of",
    "line_of",
    "read_record",
    "said_of",
]

FORM = 2
"""The version of the files."""

CHANGED = "parameter changed between steps"
EACH = "each parameter"
"""The name of settings that have one element per parameter, ordered by name."""
"""The kind of parameters that differ from what the step before left."""

Spread = Literal["box", "rows", "mean", "alike", "own"]
"""How ranks share a tensor.

Each holds a ``box`` of it, or ``rows`` of the batch; the ``mean`` of their numbers counts; they hold it ``alike``, or
each has its ``own``, which only counts by itself.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """The identity of a tensor in a record: its step, kind, name and call."""

    step: int
    kind: str
    """Such as "output" or "gradient"."""
    name: str
    """FQN of the module or parameter, without wrappers; and where in an output or a state it is."""
    call: int
    """How many times the module was called before in this step."""

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call else ""
        return f"{self.kind} of {self.name or 'the model'} (step {self.step}{call})"


@dataclass(frozen=True, slots=True)
class Entry:
    """One rank's part of a tensor."""

    key: Key
    spread: Spread
    shape: tuple[int, ...]
    """Shape of the whole tensor; with spread ``own``, of this rank's tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    figures: Figures
    whole: tuple[str, int] | None = None
    """The type of its elements, and where they begin in the rank's file of whole tensors; None if they are not kept."""


@dataclass
class RankRecord:
    """The record of one rank."""

    head: Mapping[str, Any]
    """``rank``, ``world``, and what the run was."""
    entries: list[Entry] = field(default_factory=list)
    cut: str = ""
    """Why the record ends before the run did; empty if it does not."""


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank{rank:05}.jsonl"


def said_of(
    key: Key, spread: Spread, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], dtype: str
) -> str:
    """Return what the line of a tensor holds in every step."""
    values = (key.kind, key.name, key.call, spread, shape, offsets, sizes, dtype)
    return json.dumps(values, separators=(",", ":"))[1:-1]


def line_of(step: int, said: str, packed: str, whole: tuple[str, int] | None = None) -> str:
    """Return the line of an entry.

    Args:
        step: The step.
        said: What `said_of` returned.
        packed: The figures.
        whole: See `Entry`.
    """
    kept = "" if whole is None else f',"{whole[0]}",{whole[1]}'
    return f'[{step},{said},"{packed}"{kept}]'


def read_record(folder: Path) -> list[RankRecord]:
    """Return what each rank has recorded, in their order. A file that a kill has cut off is read up to there.

    Raises:
        CheckpointNotFoundError: The folder holds no record.
        FormatError: A file is not one of a record.
    """
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        raise CheckpointNotFoundError(
            f"{str(folder)!r} holds no record. Write the folder that was given to mmfsdp.recording().", file=folder
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> RankRecord:
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
        try:
            head = json.loads(first)
            form = head["mmfsdp_record"]
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError("The file does not begin as a record of mmfsdp.recording() does.", file=path) from error
        if form != FORM or not isinstance(head.get("rank"), int) or not isinstance(head.get("world"), int):
            raise FormatError(
                f"The record has version {form!r}, and this mmfsdp reads version {FORM}: sketches of two versions "
                "cannot be compared. Record both runs again with one version of mmfsdp.",
                file=path,
            )
        found = RankRecord(head)
        ended = False
        for number, line in enumerate(lines, start=2):
            try:
                value = json.loads(line)
                if isinstance(value, dict):
                    found.cut, ended = str(value.get("stopped", "")), True
                else:
                    found.entries.append(entry_of(value))
            except (ValueError, TypeError, IndexError):
                found.cut = f"line {number} is cut off or damaged; what follows was not read"
                return found
    if not ended:
        found.cut = "the process ended before the recording did"
    return found


def entry_of(value: Any) -> Entry:
    """Return the entry that `line_of` has written.

    Args:
        value: The line, as JSON reads it.

    Raises:
        ValueError: It is something else.
    """
    step, kind, name, call, spread, shape, offsets, sizes, dtype, packed, *kept = value
    if spread not in ("box", "rows", "mean", "alike", "own") or not len(shape) == len(offsets) == len(sizes):
        raise ValueError("not an entry")
    key = Key(int(step), str(kind), str(name), int(call))
    whole = (str(kept[0]), int(kept[1])) if kept else None
    return Entry(key, spread, tuple(shape), tuple(offsets), tuple(sizes), str(dtype), Figures.unpack(packed), whole)


def entries_by_key(record: list[RankRecord]) -> Iterator[tuple[Key, list[tuple[int, Entry]]]]:
    """Yield each tensor with the parts of all ranks that have it, in the order of the first rank's computation."""
    parts: dict[Key, list[tuple[int, Entry]]] = {}
    for rank in record:
        for entry in rank.entries:
            parts.setdefault(entry.key, []).append((rank.head["rank"], entry))
    yield from parts.items()
