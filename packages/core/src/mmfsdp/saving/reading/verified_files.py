"""Reads boxes of tensors from files that stay open, and compares what it reads with checksums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from mmfsdp.basics import descriptors
from mmfsdp.basics.boxes import Bounds, is_within, meet
from mmfsdp.checkpoint.chunks import Chunk, Record
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles, read_errors, truncated
from mmfsdp.checkpoint.files.elements import packed_blocks
from mmfsdp.checkpoint.files.expected_reads import extent_of
from mmfsdp.checkpoint.geometry import ByteRun, StridedRun, byte_runs
from mmfsdp.checkpoint.integrity import crc32, crc32_of_stretch
from mmfsdp.checkpoint.manifest import BLOCK, FileEntry
from mmfsdp.errors import CorruptCheckpointError
from mmfsdp.saving.reading.file_sums import FileSums

__all__ = ["VerifiedFiles", "block_sum"]

_PIECE = 1 << 20  # bytes that are summed while the processor's cache still holds them


def block_sum(entry: FileEntry, number: int) -> tuple[int, int] | None:
    """Return length in bytes and CRC-32 of a block of a file, by its number; ``None`` past the end."""
    blocks = entry.blocks or ()
    return (min(BLOCK, entry.size - number * BLOCK), blocks[number]) if number < len(blocks) else None


class VerifiedFiles:
    """Files that are read in parts, and verified where there are checksums.

    A record that is read whole is compared with its own CRC-32. For a record that is read in part, the blocks around
    the part are read and compared with the manifest's checksums. Without these, the whole record is read once.

    Args:
        verify: Compare what is read with checksums.
        own_records: Also check a record that is read in part and whose blocks have no checksums. Pass False where
            another rank does so, see `check`.
        sums: The checksums of blocks.
    """

    def __init__(self, *, verify: bool, own_records: bool, sums: FileSums | None = None) -> None:
        self._verify, self.own_records, self._sums = verify, own_records, sums or FileSums()
        self._checked: set[Record] = set()
        self._block: tuple[Path | None, int, bytes] = None, -1, b""
        self._open = OpenFiles()

    def expect(self, boxes: Iterable[tuple[TensorEntry, Bounds]]) -> None:
        """Say which boxes of tensors will be read, in this order, so that servers are asked for them in time."""
        self._open.close()  # files that are open know nothing of it
        runs = (run for entry, box in boxes for run in byte_runs(entry, *box))
        self._open.expect(extent_of(run) for run in runs)

    def close(self) -> None:
        """Close all files."""
        self._open.close()

    def fill(self, entry: TensorEntry, box: Bounds, target: memoryview) -> None:
        """Read a box of a tensor.

        Args:
            entry: The tensor; its chunks must cover the box.
            box: Offsets and sizes of the box, in elements.
            target: Writable memory for the box, in row-major order.

        Raises:
            CorruptCheckpointError: A checksum differs, a file ends too early, or it changed while it was read.
            CheckpointError: A file is missing or cannot be read.
        """
        for chunk in entry.chunks():
            if not chunk.numel or not meet(chunk.bounds, box):
                continue
            runs = byte_runs(replace(entry, stored=(chunk,)), *box)
            with read_errors(chunk.file):
                self._fill_from(chunk, box, runs, target, entry.name)

    def check(self, records: Iterable[tuple[str, Record]]) -> None:
        """Read whole records and compare them with their CRC-32.

        Args:
            records: Each record, with the name of a tensor in it for messages.

        Raises:
            CorruptCheckpointError: A record's checksum differs, or its file ends too early.
        """
        for name, record in records:
            if not self._verify or record in self._checked or record.crc32 is None:
                continue
            with read_errors(record.file):
                source = self._open.descriptor(record.file)
                end = record.offset + record.nbytes
                found, reached = crc32_of_stretch(source, record.offset, end)
            if reached < end:
                raise truncated(record.file, name, reached)
            _compare(found, record.crc32, name, record.file, record.offset, end)
            self._checked.add(record)

    def _fill_from(
        self, chunk: Chunk, box: Bounds, runs: Sequence[ByteRun | StridedRun], target: memoryview, name: str
    ) -> None:
        if not self._verify:
            for run in runs:
                self._read(run, target, name)
        elif chunk.crc32 is not None and len(runs) == 1 and _is_all_of(runs[0], chunk):
            begin, end = chunk.offset, chunk.offset + chunk.nbytes
            found = self._read_summed(chunk.file, begin, target[runs[0].target :][: chunk.nbytes], name)
            _compare(found, chunk.crc32, name, chunk.file, begin, end)
        elif (entry := self._sums.of(chunk.file)) is not None:
            for run in sorted(runs, key=lambda run: run.source):
                self._read_blocks(run, chunk, entry, target, name)
        else:
            if chunk.record is not None and (self.own_records or is_within(chunk.bounds, box)):
                self.check([(name, chunk.record)])
            for run in runs:
                self._read(run, target, name)

    def _read(self, run: ByteRun | StridedRun, target: memoryview, name: str) -> None:
        source = self._open.descriptor(run.file)
        view = target[run.target :][: run.length]
        if isinstance(run, ByteRun):
            _read_all(source, run.file, run.source, view, name)
            return
        done = 0
        for block in packed_blocks(source, run, name):
            view[done : done + len(block)] = block
            done += len(block)

    def _read_summed(self, file: Path, begin: int, view: memoryview, name: str) -> int:
        """Read in pieces that are still in the processor's cache when their checksum is taken."""
        source, value = self._open.descriptor(file), 0
        for at in range(0, len(view), _PIECE):
            piece = view[at : at + _PIECE]
            _read_all(source, file, begin + at, piece, name)
            value = crc32(piece, value)
        return value

    def _read_blocks(
        self, run: ByteRun | StridedRun, chunk: Chunk, entry: FileEntry, target: memoryview, name: str
    ) -> None:
        if isinstance(run, StridedRun):
            for number in range(chunk.offset // BLOCK, -(-(chunk.offset + chunk.span) // BLOCK)):
                self._verified_block(run.file, entry, number, name)
            self._read(run, target, name)
            return
        at, end = run.source, run.source + run.length
        while at < end:
            number = at // BLOCK
            begin = number * BLOCK
            until = min(begin + BLOCK, end)
            view = target[run.target + at - run.source :][: until - at]
            length, expected = block_sum(entry, number) or (0, 0)
            if at == begin and until - begin == length:
                found = self._read_summed(run.file, begin, view, name)
                _compare(found, expected, name, run.file, begin, until)
            else:
                block = self._verified_block(run.file, entry, number, name)
                if until - begin > len(block):
                    raise truncated(run.file, name, begin + len(block))
                view[:] = memoryview(block)[at - begin : until - begin]
            at = until

    def _verified_block(self, file: Path, entry: FileEntry, number: int, name: str) -> bytes:
        if self._block[:2] != (file, number):
            source, begin = self._open.descriptor(file), number * BLOCK
            known = block_sum(entry, number)
            data = descriptors.read_at(source, BLOCK if known is None else known[0], begin)
            if known is not None:
                length, expected = known
                _compare(crc32(data), expected, name, file, begin, begin + length)
            self._block = file, number, data
        return self._block[2]


def _is_all_of(run: ByteRun | StridedRun, chunk: Chunk) -> bool:
    return isinstance(run, ByteRun) and (run.source, run.length) == (chunk.offset, chunk.nbytes)


def _read_all(source: int, file: Path, at: int, view: memoryview, name: str) -> None:
    done = 0
    while done < len(view):
        count = descriptors.read_into(source, view[done:], at + done)
        if count == 0:
            raise truncated(file, name, at + done)
        done += count


def _compare(found: int, expected: int, name: str, file: Path, begin: int, end: int) -> None:
    if found != expected:
        raise CorruptCheckpointError(
            f"{file.name} is damaged: the CRC-32 of bytes {begin} to {end}, where tensor {name!r} lies, is {found:08x} "
            f"(expected {expected:08x}). Restore the file, or load an earlier checkpoint.",
            file=str(file),
            offset=begin,
        )
