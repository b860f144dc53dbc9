"""Plans the checksums to compare in a checkpoint: those of its records, and those of a manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.basics.text import human_bytes
from mmfsdp.checkpoint.checksums import Extent, Scanned
from mmfsdp.checkpoint.formats.zip_archive import read_records
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, FileEntry, damaged_file

__all__ = ["Check", "Mark", "planned_checks"]

_BATCH = 128 << 20  # bytes of records that are one piece of work


@dataclass(frozen=True, slots=True)
class Mark:
    """An extent of a file and the CRC-32 that it should have."""

    extent: Extent
    """Offset and length in bytes."""
    crc32: int
    """The stored checksum."""
    what: str
    """Its content, for messages."""


@dataclass(frozen=True, slots=True)
class Check:
    """A piece of work: checksums to compare within one file."""

    file: Path
    """The file."""
    marks: tuple[Mark, ...]
    """Its extents with checksums."""
    entry: FileEntry | None = None
    """The manifest's entry of the whole file."""

    @property
    def whole(self) -> bool:
        """Whether all of the file is read."""
        return self.entry is not None and self.entry.crc32 is not None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        if self.entry is not None and self.entry.crc32 is not None:
            return self.entry.size
        return sum(mark.extent[1] for mark in self.marks)

    def compare(self, scanned: Scanned) -> Iterator[tuple[str, str, int | None]]:
        """Yield message, file and offset of each checksum that does not match."""
        for mark, found in zip(self.marks, scanned.crcs, strict=True):
            if found is None:
                yield f"{self.file.name} is truncated within {mark.what}.", str(self.file), mark.extent[0]
            elif found != mark.crc32:
                yield (
                    f"{mark.what} in {self.file.name} is damaged: its CRC-32 is {found:08x} (expected "
                    f"{mark.crc32:08x}).",
                    str(self.file),
                    mark.extent[0],
                )
        expected = None if self.entry is None else self.entry.crc32
        if expected is not None and scanned.whole != expected:
            yield damaged_file(self.file, scanned.whole, expected), str(self.file), None


def planned_checks(layout: Layout, listed: Mapping[Path, FileEntry]) -> tuple[list[Check], list[str]]:
    """Return the checksums to compare, and what cannot be checked.

    Args:
        layout: The checkpoint.
        listed: Files that a manifest lists, with what it says.

    Raises:
        CorruptCheckpointError, FormatError: An archive's directory cannot be read.
    """
    marks: dict[Path, dict[Extent, Mark]] = {}
    unchecked_tensors, unchecked_bytes = 0, 0
    whole = {file for file, entry in listed.items() if entry.crc32 is not None}
    for name, entry in layout.tensors.items():
        blind = 0
        for chunk in entry.chunks():
            record = chunk.record
            if record is not None and record.crc32 is not None:
                extent = record.offset, record.nbytes
                what = f"The data of tensor {name!r}"
                marks.setdefault(record.file, {}).setdefault(extent, Mark(extent, record.crc32, what))
            elif chunk.file not in whole:
                blind += chunk.nbytes
        unchecked_tensors, unchecked_bytes = unchecked_tensors + (blind > 0), unchecked_bytes + blind
    # The pickle, and what other ranks hold a copy of, is in no tensor of the layout.
    for file in _archives(layout):
        for item in read_records(file).values():
            extent = item.offset, item.nbytes
            if item.crc32 is not None:
                mark = Mark(extent, item.crc32, f"Entry {item.name!r}")
                marks.setdefault(file, {}).setdefault(extent, mark)
    checks = [check for file in {**marks, **listed} for check in _checks(file, marks.get(file, {}), listed.get(file))]
    unchecked = []
    if unchecked_tensors:
        unchecked.append(
            f"the data of {unchecked_tensors} of {len(layout.tensors)} tensors ({human_bytes(unchecked_bytes)}): "
            f"{layout.format} stores no checksum for it, and no {MANIFEST_NAME} has one"
        )
    # The metadata of DCP says where things lie, which is the same for every step.
    several = layout.format == "dcp" or len(list(layout.files())) > 1
    if not listed and layout.format != "rank_local" and several:
        unchecked.append(f"whether all files are of one save: there is no {MANIFEST_NAME}")
    return checks, unchecked


def _checks(file: Path, marks: Mapping[Extent, Mark], entry: FileEntry | None) -> Iterator[Check]:
    if entry is not None and entry.crc32 is not None:
        yield Check(file, tuple(marks.values()), entry)
        return
    batch: list[Mark] = []
    size = 0
    for mark in sorted(marks.values(), key=lambda mark: mark.extent):
        batch.append(mark)
        size += mark.extent[1]
        if size >= _BATCH:
            yield Check(file, tuple(batch))
            batch, size = [], 0
    if batch:
        yield Check(file, tuple(batch))


def _archives(layout: Layout) -> Iterator[Path]:
    """Yield the files that are one archive of ``torch.save`` each."""
    if layout.format == "dcp":  # a file of archives: those of its tensors are in the layout
        return
    files = [layout.path] if layout.path.is_file() else sorted(layout.path.glob("rank*.pth"))
    for file in dict.fromkeys([*files, *layout.files()]):
        with file.open("rb") as opened:
            if os.pread(opened.fileno(), 4, 0) == b"PK\x03\x04":
                yield file
