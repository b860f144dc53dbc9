"""Computes which runs of bytes fill a box of a tensor from its chunks, without touching a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.layout import Chunk, TensorEntry, row_major_strides
from mmfsdp.errors import FormatError

__all__ = ["Run", "StridedRun", "byte_runs"]

_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are consecutive in the source and in the target."""

    file: Path
    """The file that holds them."""
    source: int
    """First byte, from the start of the file."""
    target: int
    """Offset in the target box, in bytes."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True, slots=True)
class StridedRun:
    """Elements that are strided in the source, such as a transposed view, and packed in the target."""

    file: Path
    """The file that holds them."""
    source: int
    """First byte of the first element, from the start of the file."""
    target: int
    """Offset in the target box, in bytes."""
    length: int
    """Number of bytes once packed."""
    item: int
    """Bytes per element."""
    sizes: tuple[int, ...]
    """Elements per dimension, in target order."""
    strides: tuple[int, ...]
    """Steps between them in the source, in elements."""


def byte_runs(
    entry: TensorEntry, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None
) -> list[Run | StridedRun]:
    """Return the byte runs that fill a row-major target box from the chunks of a tensor.

    Args:
        entry: The tensor and its chunks, which must not overlap (see ``check_coverage``).
        offsets: Where the target box begins in the tensor, in elements; its origin by default.
        sizes: Size of the target box in elements; the whole tensor by default.

    Returns:
        Runs sorted by target offset, neighbours merged. Regions that no chunk holds have no run.

    Raises:
        FormatError: The box cuts a view that repeats what is stored into more than a million pieces.
    """
    start = (0,) * len(entry.shape) if offsets is None else offsets
    extent = entry.shape if sizes is None else sizes
    item = itemsize(entry.dtype)
    runs = [run for chunk in entry.chunks() for run in _chunk_runs(chunk, item, start, extent)]
    runs.sort(key=lambda run: run.target)
    return list(_merged(runs))


def _chunk_runs(chunk: Chunk, item: int, start: tuple[int, ...], extent: tuple[int, ...]) -> Iterator[Run | StridedRun]:
    ndim = len(extent)
    low = [max(a, b) for a, b in zip(chunk.box_offsets, start, strict=True)]
    high = [min(a + b, c + d) for a, b, c, d in zip(chunk.box_offsets, chunk.box_sizes, start, extent, strict=True)]
    count = tuple(b - a for a, b in zip(low, high, strict=True))
    if any(size <= 0 for size in count):
        return
    source_strides = chunk.strides or row_major_strides(chunk.box_sizes)
    target_strides = row_major_strides(extent)

    # Dimensions from `inner` on form one block that is consecutive in the target, and in the source if that is packed.
    inner = max(ndim - 1, 0)
    while (
        inner > 0
        and count[inner] == extent[inner]
        and (chunk.strides is not None or count[inner] == chunk.box_sizes[inner])
    ):
        inner -= 1
    # What is stored bounds how many blocks there are, except where it is repeated.
    if math.prod(count[:inner]) > _BLOCKS and 0 in source_strides:
        raise FormatError(
            f"{chunk.file.name} holds part of a tensor of shape {list(chunk.box_sizes)} as an expanded view, in too "
            "many pieces. Save its contiguous() instead.",
            file=str(chunk.file),
        )
    length = math.prod(count[inner:]) * item
    source = chunk.offset + item * sum(
        (a - b) * step for a, b, step in zip(low, chunk.box_offsets, source_strides, strict=True)
    )
    target = item * sum((a - b) * step for a, b, step in zip(low, start, target_strides, strict=True))
    for index in itertools.product(*(range(size) for size in count[:inner])):
        source_at = source + item * sum(i * step for i, step in zip(index, source_strides, strict=False))
        target_at = target + item * sum(i * step for i, step in zip(index, target_strides, strict=False))
        if chunk.strides is None:
            yield Run(chunk.file, source_at, target_at, length)
        else:
            yield StridedRun(chunk.file, source_at, target_at, length, item, count[inner:], chunk.strides[inner:])


def _merged(runs: list[Run | StridedRun]) -> Iterator[Run | StridedRun]:
    last: Run | StridedRun | None = None
    for run in runs:
        if (
            isinstance(last, Run)
            and isinstance(run, Run)
            and last.file == run.file
            and last.source + last.length == run.source
            and last.target + last.length == run.target
        ):
            last = Run(last.file, last.source, last.target, last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
