"""Takes the checksums of records while their data is read for a computation, so that it is not read twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.geometry import ByteRun, byte_runs
from mmfsdp.checkpoint.integrity import crc32

__all__ = ["StreamedSums", "whole_runs"]

_Record = tuple[Path, int, int]  # file, first byte and number of bytes


def whole_runs(entry: TensorEntry) -> set[_Record]:
    """Return the contiguous runs of bytes that are read of a tensor, or of the tensors from which it is computed."""
    runs = (run for part in entry.stored_parts() for run in byte_runs(part))
    return {(run.file, run.source, run.length) for run in runs if isinstance(run, ByteRun)}


class StreamedSums:
    """The CRC-32 of records that are read from beginning to end, in blocks.

    Args:
        records: The records.

    Attributes:
        found: The CRC-32 of each record that was read to its end.
    """

    def __init__(self, records: Iterable[_Record]) -> None:
        self.found: dict[_Record, int] = {}
        # Where the next block of a record begins -> the record, and the checksum of what comes before.
        self._next = {(file, at): ((file, at, nbytes), 0) for file, at, nbytes in records}

    def see(self, file: Path, at: int, data: memoryview) -> None:
        """Take note of bytes that were read.

        Args:
            file: The file.
            at: Their offset.
            data: The bytes.
        """
        while data and (known := self._next.pop((file, at), None)):
            record, before = known
            _, begin, nbytes = record
            piece = data[: begin + nbytes - at]
            value = crc32(piece, before)
            data, at = data[len(piece) :], at + len(piece)
            if at == begin + nbytes:
                self.found[record] = value
            else:
                self._next[file, at] = record, value
