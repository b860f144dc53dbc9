"""Plans directories of torch's distributed checkpoint (DCP), so that ``torch.distributed.checkpoint.load`` reads them.

Nested content is flattened as torch's own planner does (torch/distributed/checkpoint/_traverse.py): the keys on the
way are joined with dots; a list is a value, unless a tensor or a mapping lies in it; whatever is no tensor is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmfsdp.basics.boxes import sharded_box
from mmfsdp.checkpoint.conversion.ranks import Ranks
from mmfsdp.checkpoint.files.planned_files import Piece, PlannedFile
from mmfsdp.checkpoint.formats.dcp_metadata import Box, Location
from mmfsdp.checkpoint.formats.dcp_metadata_writer import WrittenTensor, dcp_metadata
from mmfsdp.checkpoint.formats.tensor_archive import TensorArchive
from mmfsdp.checkpoint.formats.torch_zip_writer import Archive, plan_archive
from mmfsdp.checkpoint.geometry.cutting import cut
from mmfsdp.checkpoint.layout import TensorEntry, TensorRef
from mmfsdp.checkpoint.tree import select_tensors
from mmfsdp.errors import FormatError

__all__ = ["plan_dcp"]

_ALIGNMENT = 64  # bytes, as that of the data within an archive

Path = tuple[str | int, ...]


def plan_dcp(tree: Any, tensors: Mapping[str, TensorEntry], ranks: Ranks) -> list[PlannedFile]:
    """Plan the file of each rank that holds anything, and the metadata.

    Tensors are divided by rows, as ``fully_shard`` does; each row is written once, however many replicas there are.
    What has no rows lies with the first rank.

    Args:
        tree: Nested content with a ``TensorRef`` for each tensor.
        tensors: The tensors that the tree refers to.
        ranks: How many ranks.

    Raises:
        FormatError: Two paths in the tree have the same name once their keys are joined, or a value cannot be pickled.
    """
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
            locations[name, box[0]] = files[file].add(TensorArchive(part), file)
        found[name] = WrittenTensor(entry.dtype, entry.shape, tuple(boxes))
    metadata = dcp_metadata(names, found, locations)
    planned = [file.planned(name) for name, file in files.items() if file.archives]
    return [*planned, PlannedFile(".metadata", len(metadata), (), lambda _: [(0, metadata)])]


class _File:
    """The archives of one file, one after the other."""

    def __init__(self) -> None:
        self.archives: list[tuple[int, Archive | TensorArchive]] = []
        self._end = 0

    def add(self, archive: Archive | TensorArchive, name: str) -> Location:
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
    """Tell whether torch's planner goes into a container."""
    if isinstance(value, dict):
        # Torch turns every key into text. What holds no tensor is written whole instead, with its keys as they are.
        return all(isinstance(key, str) for key in value) or bool(select_tensors(value))
    return isinstance(value, list) and any(
        isinstance(child, TensorRef | dict) or (isinstance(child, list) and _divides(child)) for child in value
    )
