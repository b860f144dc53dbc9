"""Adds up what ranks have recorded of a tensor, and tells how far apart those ranks are that must be equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmfsdp.parity.records.record_files import Entry, Key, RankRecord, entries_by_key
from mmfsdp.parity.sketching.figures import Figures, add, distance

__all__ = ["Assembled", "assemble"]

_BACKWARD = "gradient of output"


@dataclass(frozen=True)
class Assembled:
    """A tensor of a run, from the parts of its ranks."""

    key: Key
    shape: tuple[int, ...]
    dtype: str
    figures: Figures | None
    """None where the whole is not known: see ``missing``."""
    missing: str
    """Why the whole is not known."""
    held: dict[int, Figures]
    """The values of single ranks, where ranks hold the same or their sum means nothing."""
    apart: float
    """The largest distance between ranks that must be equal, as a share of the norm."""
    apart_ranks: tuple[int, ...]
    """The ranks that differ from the first of those that must be equal."""
    rows: dict[int, Figures] = field(default_factory=dict)
    """The rows of single ranks, of activations."""

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating point numbers, or complex."""
        return "float" in self.dtype or "complex" in self.dtype


def assemble(record: Sequence[RankRecord]) -> dict[Key, Assembled]:
    """Return the tensors of a run, in the order in which its first rank computed them."""
    world = max(rank.head["world"] for rank in record)
    return {key: _assemble(key, parts, world) for key, parts in entries_by_key(list(record))}


def _assemble(key: Key, parts: list[tuple[int, Entry]], world: int) -> Assembled:
    first = parts[0][1]
    made = Assembled(key, first.shape, first.dtype, None, "", {}, 0.0, ())
    if {entry.spread for _, entry in parts} != {first.spread}:
        return replace(made, missing="ranks hold it in different ways")
    if first.spread == "box":
        return _boxes(made, parts)
    if first.spread == "alike":
        return _replicas(made, [parts])
    if len(parts) < world:
        return replace(made, missing=f"{world - len(parts)} of {world} ranks have not recorded it")
    if first.spread == "own":
        held = {rank: entry.figures for rank, entry in parts}
        return replace(made, held=held, figures=first.figures if world == 1 else None, missing="each rank has its own")
    scale = 1 / world if first.spread == "mean" or key.kind == _BACKWARD else 1.0
    whole = add([entry.figures for _, entry in parts], scale)
    if first.spread == "mean":
        whole = replace(whole, square=whole.total**2, low=whole.total, high=whole.total)
    elif any(entry.shape != first.shape for _, entry in parts):
        return replace(made, missing="ranks have batches of different sizes")
    return replace(made, figures=whole, rows={rank: entry.figures for rank, entry in parts} if world > 1 else {})


def _boxes(made: Assembled, parts: list[tuple[int, Entry]]) -> Assembled:
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Entry]]] = {}
    for rank, entry in parts:
        if 0 not in entry.sizes:
            boxes.setdefault((entry.offsets, entry.sizes), []).append((rank, entry))
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(made.shape):
        return replace(made, missing="ranks are missing, or hold boxes that overlap")
    return _replicas(made, list(boxes.values()))


def _replicas(made: Assembled, boxes: list[list[tuple[int, Entry]]]) -> Assembled:
    if not boxes:
        return replace(made, missing="it has no elements")
    apart, differing = 0.0, set[int]()
    for same in boxes:
        first = same[0][1].figures
        for rank, entry in same[1:]:
            size = max(first.norm, entry.figures.norm)
            far = distance(first, entry.figures)
            share = far / size if size and math.isfinite(far) else far
            if share > 0:
                apart = max(apart, share)
                differing.add(rank)
    held = {rank: entry.figures for rank, entry in boxes[0]} if len(boxes) == 1 else {}
    whole = add([same[0][1].figures for same in boxes])
    return replace(made, figures=whole, held=held, apart=apart, apart_ranks=tuple(sorted(differing)))
