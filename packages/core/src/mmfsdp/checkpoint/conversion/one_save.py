"""Holds the files of a directory to its manifest without reading the tensors: are they of one save, and undamaged.

The CRC-32 of a file follows from those that its records carry and the bytes between them. So a file of another save
is found out by reading a few kilobytes; that the records' own data is sound is checked when it is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mmfsdp.checkpoint.checksums import crc32_combine, crc32_of_stretch
from mmfsdp.checkpoint.layout import Layout, Record
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest, damaged_file
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["check_save"]


def check_save(layout: Layout) -> None:
    """Compare every file of a directory with its manifest, if there is one, trusting the records' checksums.

    Args:
        layout: The checkpoint.

    Raises:
        IncompleteCheckpointError: A file that the manifest lists is missing.
        CorruptCheckpointError: A file is of another save, or damaged outside of its records.
    """
    directory = layout.path
    if not os.path.lexists(directory / MANIFEST_NAME):
        return
    manifest = check_manifest(directory, checksums=False)
    records: dict[Path, dict[int, Record]] = {}
    for entry in layout.tensors.values():
        for chunk in entry.chunks():
            if chunk.record is not None and chunk.record.crc32 is not None:
                records.setdefault(chunk.file, {})[chunk.record.offset] = chunk.record
    for name, listed in manifest.files.items():
        path = directory / name
        if listed.crc32 is not None and (found := _joined(path, records.get(path, {}).values())) != listed.crc32:
            raise CorruptCheckpointError(damaged_file(path, found, listed.crc32), file=str(path))


def _joined(path: Path, records: Iterable[Record]) -> int:
    crc = position = 0
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        for record in sorted(records, key=lambda record: record.offset):
            if record.offset < position:
                continue  # overlapping views of one file
            crc, _ = crc32_of_stretch(descriptor, position, record.offset, crc)
            crc = crc32_combine(crc, record.crc32 or 0, record.nbytes)
            position = record.offset + record.nbytes
        return crc32_of_stretch(descriptor, position, os.fstat(descriptor).st_size, crc)[0]
