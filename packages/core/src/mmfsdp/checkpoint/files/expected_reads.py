"""Predicts which bytes a `Copier` reads, in its order, so that a server is asked for them in time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.streamed_sums import whole_runs
from mmfsdp.checkpoint.geometry import ByteRun, StridedRun, byte_runs
from mmfsdp.checkpoint.layout import Piece

__all__ = ["alternating", "compared_extents", "copied_extents", "extent_of", "read_extents"]

_PART = 4 << 20  # bytes; more than the blocks that are compared

Extent = tuple[Path, int, int]
"""A file, the first byte that is read of it, and the byte after the last."""


def copied_extents(pieces: Iterable[Piece], *, verify: bool) -> Iterator[Extent]:
    """Yield the extents that one `Copier` reads to copy pieces.

    Args:
        pieces: The pieces.
        verify: Whether it compares records with their checksums.
    """
    checked: set[tuple[Path, int, int]] = set()
    for piece in pieces:
        if verify:
            yield from _records(piece.entry, checked)
        yield from read_extents(piece.entry)


def read_extents(entry: TensorEntry) -> Iterator[Extent]:
    """Yield the extents that are read of a tensor in row-major order."""
    for part in entry.parts_in_turn():
        yield from read_extents(part)
    yield from alternating(entry.parts_together())
    if not entry.is_computed:
        yield from map(extent_of, byte_runs(entry))


def extent_of(run: ByteRun | StridedRun) -> Extent:
    """Return where the bytes of a run lie."""
    span = run.length
    if isinstance(run, StridedRun):
        span = run.item * (1 + sum((size - 1) * step for size, step in zip(run.sizes, run.strides, strict=True)))
    return run.file, run.source, run.source + span


def compared_extents(pairs: Iterable[tuple[TensorEntry, TensorEntry]]) -> Iterator[Extent]:
    """Yield the extents that are read to compare pairs of tensors block by block."""
    for pair in pairs:
        yield from alternating(pair)


def alternating(entries: Iterable[TensorEntry]) -> Iterator[Extent]:
    """Yield the extents that are read of tensors whose blocks are used together."""
    for extents in itertools.zip_longest(*map(_parts, entries)):
        yield from (extent for extent in extents if extent is not None)


def _parts(entry: TensorEntry) -> Iterator[Extent]:
    for file, begin, end in read_extents(entry):
        yield from ((file, at, min(at + _PART, end)) for at in range(begin, end, _PART))


def _records(entry: TensorEntry, checked: set[tuple[Path, int, int]]) -> Iterator[Extent]:
    """Yield the records that are compared before a tensor is copied, since they are not copied as they are."""
    whole = whole_runs(entry)
    for chunk in entry.chunks():
        if (chunk.file, chunk.offset, chunk.nbytes) in whole and chunk.crc32 is not None:
            checked.add((chunk.file, chunk.offset, chunk.nbytes))
        elif (record := chunk.record) is not None and record.crc32 is not None:
            key = record.file, record.offset, record.nbytes
            if key not in checked:
                checked.add(key)
                yield record.file, record.offset, record.offset + record.nbytes
