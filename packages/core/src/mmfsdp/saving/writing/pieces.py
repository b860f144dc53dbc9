"""Writes the pieces of planned files from this process's memory, and takes the checksums on the way."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch

from mmfsdp.basics.boxes import Bounds, EvenBoxes
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.copying import BlockWriter, reserve
from mmfsdp.checkpoint.files.disk import OpenFiles, sync
from mmfsdp.checkpoint.files.planned_files import Stretch, complete_file
from mmfsdp.checkpoint.geometry import ByteRun, StridedRun, byte_runs
from mmfsdp.checkpoint.integrity import crc32, crc32_combine
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.checkpoint.manifest import BLOCK, FileEntry
from mmfsdp.errors import FormatError
from mmfsdp.saving.writing.memory import LiveTensor, Memory, copy_into, entry_in_memory

__all__ = ["Share", "create", "joined", "live_names", "write_file", "write_pieces"]

_MOST_RUNS = 1 << 20  # of one tensor


@dataclass(frozen=True)
class Share:
    """What this rank holds of a tensor that ranks hold together."""

    tensor: torch.Tensor
    """Its elements."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Bounds
    """The box that they are of it."""
    writes: bool = True
    """Whether this rank writes it, of those that hold the same box."""
    boxes: EvenBoxes | None = None
    """Which rank of the tensor's mesh writes which box."""
    ranks: tuple[int, ...] = ()
    """The global ranks of that mesh."""

    @cached_property
    def runs(self) -> list[ByteRun]:
        """Where the elements lie in the whole tensor, packed: sorted runs from memory to the tensor."""
        found = byte_runs(entry_in_memory("", self.tensor, self.shape, self.box))
        return [run for run in found if isinstance(run, ByteRun)]

    @cached_property
    def _ends(self) -> list[int]:
        return [run.target + run.length for run in self.runs]

    def within(self, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield which bytes of a stretch of the whole tensor are held: offset in it, offset in memory, and length."""
        for run in itertools.islice(self.runs, bisect.bisect_right(self._ends, begin), None):
            low, high = max(begin, run.target), min(begin + length, run.target + run.length)
            if low >= high:
                return
            yield low - begin, run.source + low - run.target, high - low


def write_file(path: Path, file: PlannedFile) -> FileEntry:
    """Write a file whose data lies in this process's memory; wait until all is on disk. Not collective.

    Args:
        path: The file, which is replaced.
        file: The plan.

    Returns:
        Its size and checksums, including blocks.

    Raises:
        OSError: The file cannot be written.
    """
    create(path, file.size)
    written = write_pieces(path, ((piece, {}) for piece in file.pieces), border=BLOCK)
    crcs = [joined(piece, stretches) for piece, stretches in written]
    entry = complete_file(path, file, crcs, chain.from_iterable(stretches for _, stretches in written))
    sync(path)
    return entry


def create(path: Path, size: int) -> None:
    """Make a file of some bytes; a disk that is too small says so at once.

    Raises:
        OSError: There is no room, or the file cannot be made.
    """
    with path.open("wb") as file:
        reserve(file.fileno(), size)


def write_pieces(
    path: Path, pieces: Iterable[tuple[Piece, Mapping[str, Share]]], *, border: int = 0
) -> list[tuple[Piece, list[Stretch]]]:
    """Write what this process holds of some pieces into a file that has its size. Not collective.

    Args:
        path: The file.
        pieces: The pieces, each with the held parts of its live tensors.
        border: Split stretches at every multiple of this many bytes of the file; 0 does not split them.

    Returns:
        The pieces, in order, each with the stretches that were written.

    Raises:
        OSError: The file cannot be written.
        FormatError: A live tensor would be written in more than a million runs.
    """
    writer = BlockWriter(durable=True)
    found: list[tuple[Piece, list[Stretch]]] = []
    held = _Held()
    with writer.to(path):
        for piece, shares in pieces:
            stretches: list[Stretch] = []
            for at, data in held.blocks(piece.entry, shares):
                _write(writer, data, piece.at + at, border, stretches)
            found.append((piece, stretches))
    return found


def joined(piece: Piece, stretches: Sequence[Stretch]) -> int:
    """Return the CRC-32 of a piece from its stretches, which must cover it."""
    crc, end = 0, piece.at
    for begin, length, own in stretches:
        assert begin == end, f"{piece.entry.name} is written at {begin}, expected {end}"
        crc, end = crc32_combine(crc, own, length), begin + length
    assert end == piece.at + piece.entry.nbytes, f"{piece.entry.name} ends at {end}"
    return crc


def live_names(entry: TensorEntry) -> list[str]:
    """Return the names of the live tensors that a tensor is made of."""
    parts = (chunk.file for part in entry.stored_parts() for chunk in part.chunks())
    return list(dict.fromkeys(file.name for file in parts if isinstance(file, LiveTensor)))


class _Held:
    """Reads tensors from memory. Parts of a tensor on a device follow each other: it is copied once."""

    def __init__(self) -> None:
        self._latest: tuple[object, memoryview] | None = None

    def blocks(self, entry: TensorEntry, shares: Mapping[str, Share]) -> Iterator[tuple[int, memoryview]]:
        """Yield the bytes that are held of a tensor, each block with its offset in the packed tensor."""
        if isinstance(entry, CastEntry):
            [source] = entry.parts
            for at, data in self.blocks(source, shares):
                at = at // itemsize(source.dtype) * itemsize(entry.dtype)
                for block in entry.rounded(data):
                    yield at, block
                    at += len(block)
            return
        if entry.is_computed:  # what formats add, such as constants
            with OpenFiles() as files:
                at = 0
                for block in entry.blocks(files) or ():
                    yield at, block
                    at += len(block)
            return
        for run in _flat_runs(byte_runs(entry)):
            file: object = run.file
            if isinstance(file, Memory):
                yield run.target, self._view(file, file)[run.source : run.source + run.length]
            elif isinstance(file, LiveTensor) and file.name in shares:
                share = shares[file.name]
                for at, source_at, length in share.within(run.source, run.length):
                    view = self._view(share, Memory(share.tensor))
                    yield run.target + at, view[source_at : source_at + length]

    def _view(self, key: object, memory: Memory) -> memoryview:
        if self._latest is None or self._latest[0] is not key:
            self._latest = None  # only one copy at a time
            self._latest = key, memory.view()
        return self._latest[1]


def _flat_runs(runs: Iterable[ByteRun | StridedRun]) -> Iterator[ByteRun]:
    """Yield the runs of consecutive bytes that make up strided ones.

    Raises:
        FormatError: There are more than a million of them.
    """
    for run in runs:
        if isinstance(run, ByteRun):
            yield run
            continue
        sizes, strides, block = [*run.sizes], [*run.strides], run.item
        while sizes and (sizes[-1] == 1 or strides[-1] * run.item == block):
            block *= sizes.pop()
            strides.pop()
        if math.prod(sizes) > _MOST_RUNS:
            raise FormatError("A tensor would be written element by element. Save another kind, and convert it.")
        for index, position in enumerate(itertools.product(*map(range, sizes))):
            skipped = sum(step * at for step, at in zip(strides, position, strict=True)) * run.item
            yield ByteRun(run.file, run.source + skipped, run.target + index * block, block)


def _write(writer: BlockWriter, data: memoryview, at: int, border: int, stretches: list[Stretch]) -> None:
    while data:
        most = min(len(data), border - at % border) if border else len(data)
        room = writer.room(at, most)
        copy_into(room, data[: len(room)])
        goes_on = bool(stretches) and sum(stretches[-1][:2]) == at and not (border and at % border == 0)
        begin, length, crc = stretches.pop() if goes_on else (at, 0, 0)
        stretches.append((begin, length + len(room), crc32(room, crc)))
        writer.filled(len(room))
        data, at = data[len(room) :], at + len(room)
