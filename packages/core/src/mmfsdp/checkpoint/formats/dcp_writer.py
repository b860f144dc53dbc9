"""Plans directories of torch's distributed checkpoint (DCP) that ``torch.distributed.checkpoint.load`` reads.

Nested content is flattened as torch's own planner does (torch/distributed/checkpoint/_traverse.py): keys are joined
with dots; a list is a value unless it contains a tensor or a mapping; everything that is not a tensor is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mmfsdp.basics.boxes import sharded_box
from mmfsdp.checkpoint.files.writing import Piece, PlannedFile
from mmfsdp.checkpoint.formats.dcp_metadata import Box, Location
from mmfsdp.checkpoint.formats.dcp_metadata_writer import WrittenTensor, dcp_metadata
from mmfsdp.checkpoint.formats.registry import Content
from mmfsdp.checkpoint.formats.torch_zip_writer import Archive, plan_archive
from mmfsdp.checkpoint.geometry import cut
from mmfsdp.checkpoint.layout import TensorEntry, TensorRef
from mmfsdp.checkpoint.tree import select_tensors
from mmfsdp.errors import FormatError

__all__ = ["plan_write"]

_ALIGNMENT = 64  # bytes, as that of the data within an archive

Path = tuple[str | int, ...]


def plan_write(content: Content) -> list[PlannedFile]:
    """Plan the file of each rank that holds anything, and the metadata.

    Tensors are divided by rows, as ``fully_shard`` does; each row is written once, however many replicas there are.
    A tensor without rows is written by the first rank.

    Raises:
        FormatError: Two paths in the tree have the same name once their keys are joined, or a value cannot be pickled.
    """
    tree, tensors, ranks = content.tree, content.tensors, content.ranks
    if not isinstance(tree, dict):
        raise FormatError("A distributed checkpoint is a mapping of names; this is not one.")
    names: dict[str, Path] = {}
    found: dict[str, WrittenTensor] = {}
    files = {f"__{rank}_0.distcp": _File() for rank in range(ranks.shards)}
    first = next(iter(files.values()))
    locations: dict[tuple[str, tuple[int, ...] | None], Location] = {}
    for path, leaf in _flattened((), tree):
        name = ".".join(map(str, path))
        if name in names:
            raise FormatError(
                f"The keys {names[name]!r} and {path!r} are both {name!r} once they are joined with dots, which a "
                "distributed checkpoint cannot tell apart. Rename one."
            )
        names[name] = path
        if not isinstance(leaf, TensorRef):
            held = {ref: tensors[ref] for ref in select_tensors(leaf)}
            locations[name, None] = first.add(plan_archive(leaf, held), "__0_0.distcp")
            continue
        entry = tensors[leaf.name]
        boxes: list[Box] = []
        for file, (box, part) in zip(files, _parts(entry, ranks.shards), strict=False):
            if boxes and 0 in box[1]:
                continue
            boxes.append(box)
            locations[name, box[0]] = files[file].add(_TensorArchive(part), file)
        found[name] = WrittenTensor(entry.dtype, entry.shape, tuple(boxes))
    metadata = dcp_metadata(names, found, locations)
    planned = [file.planned(name) for name, file in files.items() if file.archives]
    return [*planned, PlannedFile(".metadata", len(metadata), (), lambda _: [(0, metadata)])]


class _File:
    """The archives of one file, one after the other."""

    def __init__(self) -> None:
        self.archives: list[tuple[int, Archive | _TensorArchive]] = []
        self._end = 0

    def add(self, archive: Archive | _TensorArchive, name: str) -> Location:
        base = self._end + -self._end % _ALIGNMENT
        self.archives.append((base, archive))
        self._end = base + archive.size
        return Location(name, base, archive.size)

    def planned(self, name: str) -> PlannedFile:
        pieces = [archive.pieces(base) for base, archive in self.archives]
        flat = tuple(piece for group in pieces for piece in group)
        return PlannedFile(name, self._end, flat, lambda crcs: self._blocks(pieces, crcs))

    def _blocks(self, pieces: list[tuple[Piece, ...]], crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        begin = 0
        for (base, archive), group in zip(self.archives, pieces, strict=True):
            yield from archive.blocks(base, crcs[begin : begin + len(group)])
            begin += len(group)
            end = base + archive.size
            yield end, bytes(-end % _ALIGNMENT if end < self._end else 0)


def _parts(entry: TensorEntry, parts: int) -> Iterator[tuple[Box, TensorEntry]]:
    if not entry.numel or not entry.shape:
        yield ((0,) * len(entry.shape), entry.shape), entry
        return
    for part in range(parts):
        offsets, sizes = sharded_box(entry.shape, [parts], [0], [part])
        yield (offsets, sizes), cut(entry, offsets, sizes)


def _flattened(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value and (not path or _divides(value)):
        for key, child in value.items():
            yield from _flattened((*path, str(key)), child)
    elif isinstance(value, list) and _divides(value):
        for index, child in enumerate(value):
            yield from _flattened((*path, index), child)
    elif path:
        yield path, value


def _divides(value: Any) -> bool:
    """Tell whether torch's planner flattens a container."""
    if isinstance(value, dict):
        # Torch turns every key into text. What holds no tensor is written whole instead, with its keys as they are.
        return all(isinstance(key, str) for key in value) or bool(select_tensors(value))
    return isinstance(value, list) and any(
        isinstance(child, TensorRef | dict) or (isinstance(child, list) and _divides(child)) for child in value
    )


class _TensorArchive:
    """One tensor as torch would save it, within a larger file.

    Args:
        entry: The tensor.
    """

    __slots__ = ("_entry", "_frame")

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self._frame = _frame(entry.dtype, entry.shape)

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self._frame.before) + self._entry.nbytes + len(self._frame.after)

    def pieces(self, base: int) -> tuple[Piece, ...]:
        """Return the tensor data of an archive that begins at byte ``base`` of its file."""
        return (Piece(self._entry, base + len(self._frame.before)),)

    def blocks(self, base: int, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield what lies before and after the data, given its CRC-32."""
        frame, crc = self._frame, struct.pack("<I", crcs[0])
        yield base, _patched(frame.before, frame.crc_before, crc)
        yield base + len(frame.before) + self._entry.nbytes, _patched(frame.after, frame.crc_after, crc)


@dataclass(frozen=True, slots=True)
class _Frame:
    before: bytes
    crc_before: int  # where the checksum goes, in bytes
    after: bytes
    crc_after: int


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> _Frame:
    entry = TensorEntry("", dtype, shape, ())
    archive = plan_archive(TensorRef(""), {"": entry})
    [piece] = archive.pieces(0)
    # The checksum goes where archives with different checksums differ.
    (before, after), (other, another) = (
        [
            b"".join(block for at, block in archive.blocks(0, [crc]) if (at < piece.at) is first)
            for first in (True, False)
        ]
        for crc in (0, 0xFFFFFFFF)
    )
    return _Frame(before, _first_difference(before, other), after, _first_difference(after, another))


def _first_difference(one: bytes, other: bytes) -> int:
    return next(at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right)


def _patched(data: bytes, at: int, crc: bytes) -> bytes:
    return data[:at] + crc + data[at + len(crc) :]
