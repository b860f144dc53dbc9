"""Writes planned files: threads copy the tensor data, and then the bytes around it follow, with its checksums."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.copying import BlockWriter, Copier, RecordKey, reserve
from mmfsdp.checkpoint.files.disk import write_all
from mmfsdp.checkpoint.files.expected_reads import copied_extents
from mmfsdp.checkpoint.integrity import crc32, crc32_combine
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.checkpoint.manifest import BLOCK, BlockSums, FileEntry

if TYPE_CHECKING:
    from mmfsdp.checkpoint.files.journal import Journal

__all__ = ["Progress", "StoppedError", "Stretch", "Tracker", "complete_file", "joined_crc", "write_files"]

Stretch = tuple[int, int, int]
"""Offset in a file, length, and CRC-32 of bytes that were written."""


_MOST_JOBS = 4  # more hardly help, because memory is the limit
_BATCH = 16 << 20  # bytes of tensors that are one piece of work
_MERGED = 1 << 20  # bytes of small blocks that are written at once


def write_files(
    target: Path,
    files: Sequence[PlannedFile],
    *,
    verify: bool = True,
    progress: Progress | None = None,
    jobs: int | None = None,
    fsync: bool = False,
    journal: Journal | None = None,
) -> dict[str, FileEntry]:
    """Create the files of a target, in constant memory.

    Args:
        target: The file to create, or the directory to create them in; it must not exist.
        files: The files and their content.
        verify: Check the stored CRC-32 of every source record.
        progress: Called with the bytes of tensor data copied so far and their total, never by two threads at once.
        jobs: Most threads that copy; by default one per processor, up to four. The written bytes do not depend on it.
        fsync: Let the disk begin to write at once, because the caller will sync the files.
        journal: Where the parts that are written are recorded; those that are already recorded are kept.

    Returns:
        Size and CRC-32 of each file by name, as a manifest lists them, without reading the files again.

    Raises:
        CorruptCheckpointError: Source data does not match its checksum, or a file of the source ends too early.
    """
    continues = journal is not None and journal.continues
    if [file.name for file in files] != [""]:
        target.mkdir(exist_ok=continues)
    paths = [target / file.name if file.name else target for file in files]
    for file, path in zip(files, paths, strict=True):
        if not (continues and path.is_file() and path.stat().st_size == file.size):
            with path.open("wb" if continues else "xb") as created:
                reserve(created.fileno(), file.size)
    tracker = Tracker(sum(file.nbytes for file in files), progress)
    parts = [[*_parts(file, path)] for file, path in zip(files, paths, strict=True)]
    # A server is asked for what one thread will read, in its order; many threads ask it.
    remote = _any_remote(files)
    most = 1 if remote else jobs or min(_MOST_JOBS, os.cpu_count() or 1)
    # No more than there is work for: each thread has its own buffers.
    count = max(1, min(most, sum(map(len, parts))))
    entries = {}
    if journal is not None:
        with ThreadPoolExecutor(count, thread_name_prefix="mmfsdp-kept") as pool, tracker.stopping(pool):
            parts = [[*pool.map(partial(_kept, tracker, journal), own)] for own in parts]
    with ExitStack() as stack:
        idle: SimpleQueue[_Worker] = SimpleQueue()
        verified: set[RecordKey] = set()
        for _ in range(count):
            writer = BlockWriter(durable=fsync)
            copier = stack.enter_context(Copier(tracker.advance, writer, verified=verified if verify else None))
            if remote:
                left = (piece for own in parts for part in own if part.crcs is None for piece in part.pieces)
                copier.expect(copied_extents(left, verify=verify))
            idle.put((copier, writer))
        pool = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="mmfsdp-copy"))
        with tracker.stopping(pool):
            copies = [[pool.submit(_copy, idle, tracker, journal, part) for part in own] for own in parts]
            for file, path, futures in zip(files, paths, copies, strict=True):
                crcs = [crc for copied in futures for crc in copied.result()]
                entries[file.name] = complete_file(path, file, crcs)
    return entries


def _any_remote(files: Iterable[PlannedFile]) -> bool:
    """Tell whether any data of files that will be written comes from a server."""
    return any(is_remote(chunk.file) for file in files for piece in file.pieces for chunk in piece.entry.chunks())


class _Part(NamedTuple):
    """A piece of work: some neighbouring pieces of a file."""

    path: Path
    file: str
    first: int
    pieces: Sequence[Piece]
    crcs: list[int] | None = None  # if they are written already


def _parts(file: PlannedFile, path: Path) -> Iterator[_Part]:
    begin = size = 0
    for stop, piece in enumerate(file.pieces, start=1):
        size += piece.entry.nbytes
        if size >= _BATCH:
            yield _Part(path, file.name, begin, file.pieces[begin:stop])
            begin, size = stop, 0
    if begin < len(file.pieces):
        yield _Part(path, file.name, begin, file.pieces[begin:])


def _kept(tracker: Tracker, journal: Journal, part: _Part) -> _Part:
    """Return a part with its checksums if an interrupted conversion has written it."""
    tracker.advance(0)
    crcs = journal.kept(part.path, part.file, part.first, part.pieces)
    if crcs is not None:
        tracker.advance(sum(piece.entry.nbytes for piece in part.pieces))
    return part._replace(crcs=crcs)


_Worker = tuple[Copier, BlockWriter]


def _copy(idle: SimpleQueue[_Worker], tracker: Tracker, journal: Journal | None, part: _Part) -> list[int]:
    if part.crcs is not None:
        return part.crcs
    copier, writer = worker = idle.get()
    try:
        with writer.to(part.path):
            crcs = [copier.copy_tensor(piece.entry, piece.at) for piece in part.pieces]
        if journal is not None:
            journal.note(part.file, part.first, crcs)
        return crcs
    except BaseException as error:
        tracker.stop(error)
        raise
    finally:
        idle.put(worker)


def complete_file(
    path: Path, file: PlannedFile, crcs: Sequence[int], data: Iterable[Stretch] | None = None
) -> FileEntry:
    """Write everything but the tensor data to a file, and return its size and CRC-32.

    Args:
        path: The file, which has its size and its tensor data.
        file: What was planned.
        crcs: The CRC-32 of each piece.
        data: The data, in the order of the file, in stretches that lie within blocks: the result has their checksums,
            too.
    """
    written: list[Stretch] = []
    with path.open("r+b", buffering=0) as opened:
        for offset, block in _adjoining(file.blocks(crcs)):
            write_all(opened.fileno(), block, offset)
            parts = [(offset, block)] if data is None else _within_blocks(offset, block)
            written += [(at, len(part), crc32(part)) for at, part in parts]
    if data is not None:
        return _entry_with_blocks(heapq.merge(data, written), file.size)
    pieces = ((piece.at, piece.entry.nbytes, crc) for piece, crc in zip(file.pieces, crcs, strict=True))
    return FileEntry(file.size, joined_crc(heapq.merge(pieces, written), file.size))


def _adjoining(blocks: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Join adjoining blocks, up to about a megabyte."""
    begin, held = 0, bytearray()
    for offset, block in blocks:
        if held and (offset != begin + len(held) or len(held) >= _MERGED):
            yield begin, bytes(held)
            held.clear()
        if not held:
            begin = offset
        held += block
    if held:
        yield begin, bytes(held)


def _within_blocks(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    begin = 0
    while begin < len(data):
        end = begin + BLOCK - (offset + begin) % BLOCK
        yield offset + begin, data[begin:end]
        begin = end


def _entry_with_blocks(stretches: Iterable[Stretch], size: int) -> FileEntry:
    """Return the entry of a file from its stretches, in order, none of which leaves its block; zeros lie between."""
    sums = BlockSums()
    for offset, length, crc in stretches:
        sums.add(bytes(offset - sums.size))
        sums.add_sum(crc, length)
    sums.add(bytes(size - sums.size))
    return sums.entry()


def joined_crc(stretches: Iterable[Stretch], size: int) -> int:
    """Return the CRC-32 of a file from the CRC-32 of its stretches, in order; there are zeros between them."""
    crc = position = 0
    for offset, length, own in stretches:
        if not length:
            continue
        crc = crc32_combine(crc32(bytes(offset - position), crc), own, length)
        position = offset + length
    return crc32(bytes(size - position), crc)


Progress = Callable[[int, int], None]
"""Called with the bytes copied so far and the bytes to copy in total."""


class StoppedError(Exception):
    """Another thread has failed, or the caller has stopped the work."""


class Tracker:
    """The progress that threads working on one task share.

    Args:
        total: Bytes to copy, for ``progress``.
        progress: Called after each block, never by two threads at once; an error that it raises stops the work.
    """

    def __init__(self, total: int = 0, progress: Progress | None = None) -> None:
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        self.done = 0
        """Bytes copied so far."""
        self.failure: BaseException | None = None
        """The first error that stopped the work."""

    def advance(self, count: int) -> None:
        """Add copied bytes; with 0, only check whether to go on.

        Raises:
            StoppedError: The work must stop.
        """
        if self.failure is not None:
            raise StoppedError
        if count:
            with self._lock:
                if self.failure is not None:  # of a thread that had the lock until now
                    raise StoppedError
                self.done += count
                try:
                    if self._progress is not None:
                        self._progress(self.done, self._total)
                except BaseException as error:
                    self.failure = error
                    raise

    def stop(self, failure: BaseException) -> None:
        """Make every further ``advance`` raise; the first failure is kept."""
        with self._lock:
            if self.failure is None:
                self.failure = failure

    @contextmanager
    def stopping(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """Stop the threads of a pool if the block fails, and raise what failed first."""
        try:
            yield
        except BaseException as error:  # an interrupt too: nothing may be left running
            self.stop(error)
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, StoppedError) and self.failure is not None:
                raise self.failure from None
            raise
