"""Proves before any copying that the chunks of each tensor cover it exactly and lie inside their files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mmfsdp.basics.boxes import Boxes, EvenBoxes, meet
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, Unlocated
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["check_coverage"]


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
    for name in layout.tensors if names is None else names:
        entry = layout.tensors[name]
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
    if isinstance(boxes, EvenBoxes):  # they cover the tensor exactly, whatever its shape
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
            sizes[chunk.file] = os.stat(chunk.file).st_size
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
