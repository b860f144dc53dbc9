"""Tensors that are kept whole beside a record, and the elements in which two runs differ. No torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from mmfsdp.errors import FormatError
from mmfsdp.parity.records.record_files import Entry, Key, RankRecord

__all__ = ["Whole", "differing_elements", "kept_wholes", "read_whole", "whole_file"]

_SHOWN = 3  # elements


@dataclass(frozen=True)
class Whole:
    """A whole tensor."""

    shape: tuple[int, ...]
    values: array[Any]
    """The elements in order: of float64 or int64 as they are, of others as float32."""


def whole_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank with its parts of whole tensors."""
    return folder / f"rank{rank:05}.whole"


def kept_wholes(record: Sequence[RankRecord]) -> dict[Key, list[tuple[int, Entry]]]:
    """Return the ranks and their parts of each tensor that was kept whole.

    Args:
        record: What `read_record` returned.
    """
    found: dict[Key, list[tuple[int, Entry]]] = {}
    for rank in record:
        for entry in rank.entries:
            if entry.whole is not None:
                found.setdefault(entry.key, []).append((rank.head["rank"], entry))
    return found


def read_whole(folder: Path, parts: Sequence[tuple[int, Entry]]) -> Whole | None:
    """Return a tensor that was kept whole; None if a part of it is missing.

    Args:
        folder: The folder of the record.
        parts: The ranks and their parts, at least one.

    Raises:
        FormatError: A file is cut off.
    """
    first = parts[0][1]
    assert first.whole is not None
    kind = first.whole[0]
    values: array[Any] = array(kind, bytes(array(kind, [0]).itemsize * math.prod(first.shape)))
    boxes = {(entry.offsets, entry.sizes): (rank, entry) for rank, entry in parts}
    filled = sum(_fill(values, first.shape, entry, _part(folder, rank, entry)) for rank, entry in boxes.values())
    return Whole(first.shape, values) if filled == math.prod(first.shape) else None


def differing_elements(one: Whole, other: Whole, limit: float) -> str:
    """Say how many elements differ by more than a share of the largest one, and show the first of them."""
    most = max((abs(value) for value in one.values if math.isfinite(value)), default=0.0)
    pairs = enumerate(zip(one.values, other.values, strict=True))
    wrong = [(offset, a, b) for offset, (a, b) in pairs if not (abs(a - b) <= limit * most or a == b)]
    if not wrong:
        return ""
    shown = ", ".join(f"{_index(offset, one.shape)} is {b:.6g} and was {a:.6g}" for offset, a, b in wrong[:_SHOWN])
    return f"{len(wrong)} of {len(one.values)} elements differ: {shown}"


def _part(folder: Path, rank: int, entry: Entry) -> array[Any]:
    assert entry.whole is not None
    kind, offset = entry.whole
    held: array[Any] = array(kind)
    count = math.prod(entry.sizes)
    path = whole_file(folder, rank)
    with path.open("rb") as file:
        file.seek(offset)
        raw = file.read(count * held.itemsize)
    if len(raw) != count * held.itemsize:
        raise FormatError(f"The file ends within {entry.key}.", file=path)
    held.frombytes(raw)
    return held


def _fill(values: array[Any], shape: Sequence[int], entry: Entry, held: array[Any]) -> int:
    """Copy a box into the whole, row by row; return how many elements it has."""
    if not shape:
        values[0] = held[0]
        return 1
    width = entry.sizes[-1]
    for row, start in enumerate(_starts(shape, entry)):
        values[start : start + width] = held[row * width : (row + 1) * width]
    return len(held)


def _starts(shape: Sequence[int], entry: Entry) -> Iterator[int]:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(begin, begin + size) for begin, size in zip(entry.offsets[:-1], entry.sizes[:-1], strict=True)]
    for outer in product(*ranges):
        yield sum(index * stride for index, stride in zip((*outer, entry.offsets[-1]), strides, strict=True))


def _index(offset: int, shape: Sequence[int]) -> str:
    found = []
    for size in reversed(shape):
        found.append(offset % size)
        offset //= size
    return f"[{', '.join(map(str, reversed(found)))}]"
