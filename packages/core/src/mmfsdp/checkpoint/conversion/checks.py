"""Checks around a conversion: the source's files before, the disk of the target, and the output before it appears."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mmfsdp.checkpoint.checksums import crc32_combine, crc32_of_stretch
from mmfsdp.checkpoint.files.casting import converted_blocks
from mmfsdp.checkpoint.files.disk import OpenFiles, located, refuse_missing_parent
from mmfsdp.checkpoint.files.writing import Progress
from mmfsdp.checkpoint.formats.recognition import open_layout
from mmfsdp.checkpoint.geometry import CastEntry
from mmfsdp.checkpoint.inspection.verification import verify
from mmfsdp.checkpoint.layout import Layout, Record, TensorEntry
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, check_manifest, damaged_file
from mmfsdp.errors import CheckpointError, CorruptCheckpointError

__all__ = ["check_output", "check_replaceable", "check_save", "check_space", "free_bytes", "published_path"]

# Files in directories of checkpoints, by any writer.
_OF_CHECKPOINTS = re.compile(
    r"manifest\.json|.+\.index\.json|.+\.safetensors|\.metadata|.+\.distcp|rank\d+\.pth|.+\.bin|\..+\.mmfsdp-\w+"
)


def check_save(layout: Layout) -> None:
    """Compare every file of a directory with its manifest, if there is one, without reading the tensors.

    The CRC-32 of a file follows from the checksums of its records and the bytes between them. So a file of another
    save is detected by reading a few kilobytes; the records' own data is checked when it is copied.

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


def free_bytes(target: Path) -> int:
    """Return the bytes free where a target will be.

    Raises:
        CheckpointNotFoundError: The directory that should hold it does not exist.
    """
    refuse_missing_parent(target)
    return shutil.disk_usage(located(target).parent).free


def check_space(target: Path, needed: int, free: int) -> None:
    """Raise if a target cannot fit on its disk.

    Args:
        target: Where it will be.
        needed: Bytes to write.
        free: Bytes that are free.

    Raises:
        CheckpointError: There is not enough room.
    """
    if needed > free:
        raise CheckpointError(
            f"There is no room for {target.name}: it needs {needed} bytes, and {free} are free.", file=str(target)
        )


def check_replaceable(target: Path) -> None:
    """Raise if replacing a directory would remove files that are not part of a checkpoint.

    Args:
        target: The directory; anything else is fine.

    Raises:
        CheckpointError: It holds another file; the message names it.
    """
    if not target.is_dir() or target.is_symlink():
        return
    foreign = sorted(
        entry.name for entry in target.iterdir() if entry.is_dir() or not _OF_CHECKPOINTS.fullmatch(entry.name)
    )
    if foreign:
        raise CheckpointError(
            f"The directory {str(target)!r} is not replaced: it also holds {foreign[0]!r}, which is not part of a "
            "checkpoint. Remove the directory yourself, or choose another path.",
            file=str(target),
        )


def check_output(
    path: Path, expected: Mapping[str, TensorEntry], *, trust: bool = False, progress: Progress | None = None
) -> None:
    """Read what was written and compare every tensor with the source, and every checksum with the data.

    Args:
        path: The output.
        expected: Its tensors by name, as they come from the source.
        trust: Accept pickled objects that are not on the list of safe names.
        progress: Called with the bytes compared so far and the bytes to compare.

    Raises:
        CorruptCheckpointError: Something differs.
    """
    layout = open_layout(path, trust=trust)
    for problem in verify(layout).problems:
        raise CorruptCheckpointError(f"What was written is damaged: {problem.message}", file=problem.file)
    if [*layout.tensors] != [*expected] and {*layout.tensors} != {*expected}:
        unlike = sorted({*layout.tensors} ^ {*expected})
        raise CorruptCheckpointError(f"What was written has other tensors than the source: {unlike[0]!r}.")
    total, done = sum(entry.nbytes for entry in expected.values()), 0
    with OpenFiles() as files:
        for name, entry in expected.items():
            found = layout.tensors[name]
            if (found.dtype, found.shape) != (entry.dtype, entry.shape):
                raise _differs(name, path)
            there = _Bytes(converted_blocks(files, found))
            # What a cast reports, it has reported when it was written.
            quiet = CastEntry.of(entry.source, entry.dtype, _ignore) if isinstance(entry, CastEntry) else entry
            for block in converted_blocks(files, quiet):
                if not there.matches(block):
                    raise _differs(name, path)
                done += len(block)
                if progress is not None:
                    progress(done, total)


def published_path(path: Path, written: Path) -> Path:
    """Return the path with the first eight digits of a file's SHA-256 in its name, as OpenMMLab publishes models.

    Args:
        path: Such as ``model.pth``.
        written: The file to hash.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with written.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return path.with_name(f"{path.stem}-{digest.hexdigest()[:8]}{path.suffix}")


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


def _ignore(name: str, count: int) -> None:
    pass


def _differs(name: str, path: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"What was written for tensor {name!r} differs from the source.", file=str(path))


class _Bytes:
    """Compares a stream of blocks with one that is cut elsewhere."""

    def __init__(self, blocks: Iterator[memoryview]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def matches(self, data: memoryview) -> bool:
        while data:
            if not self._rest:
                self._rest = next(self._blocks, memoryview(b""))
                if not self._rest:
                    return False
            count = min(len(data), len(self._rest))
            if data[:count] != self._rest[:count]:
                return False
            data, self._rest = data[count:], self._rest[count:]
        return True
