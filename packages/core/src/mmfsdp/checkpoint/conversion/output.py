"""Checks what a conversion wrote against its source before it appears, and names a published file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import equal_bytes, tensor_blocks
from mmfsdp.checkpoint.files.expected_reads import alternating
from mmfsdp.checkpoint.files.planned_files import Progress, Tracker
from mmfsdp.checkpoint.formats.opening import open_layout
from mmfsdp.checkpoint.inspection.verification import verify
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["check_output", "published_path"]


def check_output(
    path: Path, expected: Mapping[str, TensorEntry], *, trust: bool = False, progress: Progress | None = None
) -> None:
    """Read what was written and compare every tensor with the source, and every checksum with the data.

    Raises:
        CorruptCheckpointError: Something differs.
    """
    layout = open_layout(path, trust=trust)
    for problem in verify(layout).problems:
        raise CorruptCheckpointError(f"What was written is damaged: {problem.message}", file=problem.file)
    if [*layout.tensors] != [*expected] and {*layout.tensors} != {*expected}:
        unlike = sorted({*layout.tensors} ^ {*expected})
        raise CorruptCheckpointError(f"What was written has other tensors than the source: {unlike[0]!r}.")
    tracker = Tracker(sum(entry.nbytes for entry in expected.values()), progress)
    with OpenFiles() as files:
        pairs = ((expected[name], layout.tensors[name]) for name in expected)
        files.expect(extent for pair in pairs for extent in alternating(pair))
        for name, entry in expected.items():
            found = layout.tensors[name]
            if (found.dtype, found.shape) != (entry.dtype, entry.shape):
                raise _differs(name, path)
            there = _Bytes(tensor_blocks(files, found))
            # What a cast reports, it has reported when it was written.
            for block in tensor_blocks(files, entry.counting(lambda _: None)):
                if not there.matches(block):
                    raise _differs(name, path)
                tracker.advance(len(block))


def published_path(path: Path, written: Path) -> Path:
    """Return the path with the first eight digits of a file's SHA-256 in its name, as OpenMMLab publishes models."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with written.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return path.with_name(f"{path.stem}-{digest.hexdigest()[:8]}{path.suffix}")


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
            if not equal_bytes(data[:count], self._rest[:count]):
                return False
            data, self._rest = data[count:], self._rest[count:]
        return True
