"""Computes which bytes of files fill a box of a tensor, and proves that its chunks cover it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmfsdp.basics.boxes import Bounds, Boxes, meet
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.chunks import Chunk, Unlocated, row_major_strides
from mmfsdp.checkpoint.entries import FoldedEntry, TensorEntry
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["ByteRun", "StridedRun", "byte_runs", "check_box", "check_coverage", "without_repeats"]

_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ByteRun:
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
) -> list[ByteRun | StridedRun]:
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
    if offsets is None and sizes is None and isinstance(entry, FoldedEntry):
        entry = entry.folded
    start = (0,) * len(entry.shape) if offsets is None else offsets
    extent = entry.shape if sizes is None else sizes
    item = itemsize(entry.dtype)
    runs = [run for chunk in entry.chunks() for run in _chunk_runs(chunk, item, start, extent)]
    runs.sort(key=lambda run: run.target)
    return list(_merged(runs))


def _chunk_runs(
    chunk: Chunk, item: int, start: tuple[int, ...], extent: tuple[int, ...]
) -> Iterator[ByteRun | StridedRun]:
    ndim = len(extent)
    low, count = chunk.shared(start, extent)
    if 0 in count:
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
            yield ByteRun(chunk.file, source_at, target_at, length)
        else:
            yield StridedRun(chunk.file, source_at, target_at, length, item, count[inner:], chunk.strides[inner:])


def _merged(runs: list[ByteRun | StridedRun]) -> Iterator[ByteRun | StridedRun]:
    last: ByteRun | StridedRun | None = None
    for run in runs:
        if (
            isinstance(last, ByteRun)
            and isinstance(run, ByteRun)
            and last.file == run.file
            and last.source + last.length == run.source
            and last.target + last.length == run.target
        ):
            last = ByteRun(last.file, last.source, last.target, last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def without_repeats(*entries: TensorEntry) -> tuple[list[TensorEntry], int]:
    """Return tensors of one shape without the repetitions they have in common, and how often each element occurs.

    A view made by ``expand`` can have more elements than any disk, though only a few are stored.

    Args:
        entries: The tensors; their chunks must cover them (see ``check_coverage``).
    """
    shape = entries[0].shape
    dims = [dim for dim, size in enumerate(shape) if size > 1 and all(entry.repeats(dim) for entry in entries)]
    if not dims:
        return list(entries), 1
    sizes = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    return [_resized(entry, sizes) for entry in entries], math.prod(shape[dim] for dim in dims)


def _resized(entry: TensorEntry, sizes: tuple[int, ...]) -> TensorEntry:
    chunk = replace(entry.chunks()[0], box_sizes=sizes, nbytes=math.prod(sizes) * itemsize(entry.dtype))
    return replace(entry, shape=sizes, stored=(chunk,))


def check_box(name: str, chunk: Chunk, box: Bounds) -> Chunk:
    """Return a chunk of a tensor, which must be the box that another file says is there.

    Raises:
        CorruptCheckpointError: It is another box.
    """
    if chunk.bounds != box:
        raise CorruptCheckpointError(
            f"{chunk.file.name} holds the box of tensor {name!r} at {list(chunk.box_offsets)} of size "
            f"{list(chunk.box_sizes)} (expected {list(box[0])} and {list(box[1])}).",
            file=str(chunk.file),
        )
    return chunk


def check_coverage(layout: Layout, names: Iterable[str] | None = None, *, look_up: bool = True) -> None:
    """Prove that chunks cover each tensor without gap or overlap, and that their files are long enough.

    Args:
        layout: The checkpoint as read.
        names: Which tensors to look at; all of them by default.
        look_up: Also locate the chunks that have no known offset yet, which reads from each file. Otherwise a chunk
            that is not where it should be is found when it is located.

    Raises:
        IncompleteCheckpointError: Elements of a tensor are in no file, or a file is missing.
        CorruptCheckpointError: Two chunks overlap, a chunk leaves its tensor, or a file ends too early.
    """
    sizes: dict[Path, int] = {}
    tensors = [layout.tensors[name] for name in (layout.tensors if names is None else names)]
    for entry in (part for tensor in tensors for part in tensor.stored_parts()):
        if not look_up and isinstance(entry.stored, Unlocated):
            _check_boxes(layout, entry, entry.stored.boxes)
            continue
        chunks = entry.chunks()
        for chunk in chunks:
            _check_box(entry, chunk)
            _check_extent(entry, chunk, sizes)
        _check_disjoint(entry, chunks)
        _check_sum(entry, sum(chunk.numel for chunk in chunks), [chunk.file for chunk in chunks], layout)


def _check_boxes(layout: Layout, entry: TensorEntry, boxes: Boxes) -> None:
    if boxes.exact:
        return
    listed = boxes.meeting(None)
    chunks = [Chunk(layout.path, 0, 0, *box) for box in listed]
    for chunk in chunks:
        _check_fits(entry, chunk)
    _check_disjoint(entry, chunks)
    _check_sum(entry, sum(chunk.numel for chunk in chunks), [], layout)


def _check_sum(entry: TensorEntry, held: int, holders: Sequence[Path], layout: Layout) -> None:
    if held == entry.numel:
        return
    files = ", ".join(dict.fromkeys(file.name for file in holders))
    raise IncompleteCheckpointError(
        f"Tensor {entry.name!r} of shape {list(entry.shape)} is incomplete: {held} of its {entry.numel} elements are "
        f"stored{f' ({files})' if files else '' if held else ' (no file)'}.",
        file=str(holders[0] if holders else layout.path),
    )


def _check_fits(entry: TensorEntry, chunk: Chunk) -> None:
    fits = len(chunk.box_offsets) == len(chunk.box_sizes) == len(entry.shape) and all(
        min(start, size) >= 0 and start + size <= whole
        for start, size, whole in zip(chunk.box_offsets, chunk.box_sizes, entry.shape, strict=True)
    )
    # An empty box at the end of a short tensor may name an offset past it: ceil(d / n) * rank.
    if not fits and not (chunk.numel == 0 and len(chunk.box_sizes) == len(entry.shape)):
        raise CorruptCheckpointError(
            f"Tensor {entry.name!r} has shape {list(entry.shape)}, but {chunk.file.name} holds the box at "
            f"{list(chunk.box_offsets)} of size {list(chunk.box_sizes)}, which does not fit into it.",
            file=str(chunk.file),
            offset=chunk.offset,
        )


def _check_box(entry: TensorEntry, chunk: Chunk) -> None:
    _check_fits(entry, chunk)
    if chunk.nbytes != chunk.numel * itemsize(entry.dtype):
        raise CorruptCheckpointError(
            f"Tensor {entry.name!r}: {chunk.file.name} holds {chunk.nbytes} bytes for a box of size "
            f"{list(chunk.box_sizes)} of {entry.dtype} (expected {chunk.numel * itemsize(entry.dtype)}).",
            file=str(chunk.file),
            offset=chunk.offset,
        )


def _check_extent(entry: TensorEntry, chunk: Chunk, sizes: dict[Path, int]) -> None:
    if chunk.file not in sizes:
        try:
            sizes[chunk.file] = chunk.file.stat().st_size
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{chunk.file.name}, which holds part of tensor {entry.name!r}, is missing.", file=str(chunk.file)
            ) from error
    end = chunk.offset + chunk.span
    if end > sizes[chunk.file]:
        raise CorruptCheckpointError(
            f"{chunk.file.name} is truncated: tensor {entry.name!r} reaches to byte {end}, but the file has "
            f"{sizes[chunk.file]} bytes.",
            file=str(chunk.file),
            offset=chunk.offset,
        )


def _check_disjoint(entry: TensorEntry, chunks: Iterable[Chunk]) -> None:
    # A sweep along the first dimension: only boxes that share a row with this one can meet it.
    boxes = sorted((chunk for chunk in chunks if chunk.numel), key=lambda chunk: chunk.box_offsets)
    active: list[Chunk] = []
    for box in boxes:
        row = box.box_offsets[0] if box.box_offsets else 0
        active = [other for other in active if not other.box_sizes or other.box_offsets[0] + other.box_sizes[0] > row]
        for other in active:
            if meet(box.bounds, other.bounds):
                raise CorruptCheckpointError(
                    f"Tensor {entry.name!r}: the boxes in {other.file.name} (at {list(other.box_offsets)}, size "
                    f"{list(other.box_sizes)}) and {box.file.name} (at {list(box.box_offsets)}, size "
                    f"{list(box.box_sizes)}) overlap.",
                    file=str(box.file),
                    offset=box.offset,
                )
        active.append(box)
