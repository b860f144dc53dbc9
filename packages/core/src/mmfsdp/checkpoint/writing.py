"""Writes planned files: copies tensor data to its places, then puts around it what depends on its checksums."""

from __future__ import annotations

import heapq
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from mmfsdp.checkpoint.copying import Copier, Progress
from mmfsdp.checkpoint.crc import crc32_combine
from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.checkpoint.planned_files import PlannedFile

__all__ = ["write_files"]


def write_files(
    target: Path, files: Sequence[PlannedFile], *, verify: bool = True, progress: Progress | None = None
) -> dict[str, FileEntry]:
    """Create the files of a target, in constant memory.

    Args:
        target: The file to create, or the directory to create them in; it must not exist.
        files: What they hold.
        verify: Check the stored CRC-32 of every source record.
        progress: Called with the bytes of tensor data copied so far and their total.

    Returns:
        Size and CRC-32 of each file by name: what a manifest says, without having read them again.

    Raises:
        CorruptCheckpointError: Source data does not match its checksum, or a file of the source ends too early.
    """
    if [file.name for file in files] != [""]:
        target.mkdir()
    entries: dict[str, FileEntry] = {}
    with Copier(total=sum(file.nbytes for file in files), verify=verify, progress=progress) as copier:
        for file in files:
            with (target / file.name if file.name else target).open("xb", buffering=0) as opened:
                entries[file.name] = _write_file(opened.fileno(), file, copier)
    return entries


def _write_file(descriptor: int, file: PlannedFile, copier: Copier) -> FileEntry:
    os.ftruncate(descriptor, file.size)
    crcs = [copier.copy_tensor(piece.entry, descriptor, piece.at) for piece in file.pieces]
    written: list[_Stretch] = []
    for offset, block in file.blocks(crcs):
        _write(descriptor, offset, block)
        written.append((offset, len(block), zlib.crc32(block)))
    pieces = ((piece.at, piece.entry.nbytes, crc) for piece, crc in zip(file.pieces, crcs, strict=True))
    return FileEntry(file.size, _joined(heapq.merge(pieces, written), file.size))


_Stretch = tuple[int, int, int]  # offset, length, CRC-32


def _joined(stretches: Iterable[_Stretch], size: int) -> int:
    """Return the CRC-32 of a file from those of its stretches, in order; there are zeros between them."""
    crc = position = 0
    for offset, length, own in stretches:
        crc = crc32_combine(zlib.crc32(bytes(offset - position), crc), own, length)
        position = offset + length
    return zlib.crc32(bytes(size - position), crc)


def _write(descriptor: int, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
