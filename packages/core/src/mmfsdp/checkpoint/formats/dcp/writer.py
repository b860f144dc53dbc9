"""Plans directories of torch's distributed checkpoint (DCP) that ``torch.distributed.checkpoint.load`` reads.

`mmfsdp.checkpoint.formats.dcp.names` says under which flat names values are stored; everything that is not a tensor is
pickled. ``.metadata`` names classes of torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from mmfsdp.basics.boxes import Bounds, Boxes, EvenBoxes
from mmfsdp.basics.dtypes import torch_name
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import CheckpointContent
from mmfsdp.checkpoint.formats.dcp.index import FILE, Item, Named, Rules, index_bytes
from mmfsdp.checkpoint.formats.dcp.items import Location, Locations
from mmfsdp.checkpoint.formats.dcp.metadata import INTEGER_KEYS, TensorInfo
from mmfsdp.checkpoint.formats.dcp.names import Keys, NestedKinds, flatten_nested, integer_keys
from mmfsdp.checkpoint.formats.torch_files.torch_zip_writer import Archive, plan_archive
from mmfsdp.checkpoint.layout import Piece, PlannedFile, TensorRef
from mmfsdp.checkpoint.pickles.pickling import PickleWriter, int_opcodes, name_opcodes, text_opcodes
from mmfsdp.checkpoint.pickles.unpickling import PickledObject
from mmfsdp.checkpoint.tree import is_ref, select_tensors
from mmfsdp.errors import FormatError

__all__ = ["Items", "plan_metadata", "plan_rank", "plan_write"]

_ALIGNMENT = 64  # bytes, as for the data within an archive


@dataclass(frozen=True)
class Items:
    """The content of a directory to be written, by flat name, in order."""

    keys: Mapping[str, Keys]
    """The nested keys that each name was made of."""
    tensors: Mapping[str, tuple[TensorEntry, Boxes]]
    """The tensors, and which rank writes which box of each."""
    objects: Mapping[str, Archive]
    """The values that are not tensors, pickled; the first rank writes them."""
    ranks: int
    """How many ranks there are."""

    @property
    def rules(self) -> Rules | None:
        """The content of all files; None if the boxes of a tensor follow no rule."""
        names: dict[str, Named] = {}
        for name, keys in self.keys.items():
            if name not in self.tensors:
                names[name] = Named(keys)
                continue
            entry, boxes = self.tensors[name]
            if not isinstance(boxes, EvenBoxes):
                return None
            names[name] = Named(keys, entry.dtype, boxes)
        return Rules(self.ranks, names)

    def boxes(self, name: str) -> Mapping[Bounds, int]:
        """Return the boxes of a tensor that are written, each with its rank: the first, for tensors without rows."""
        entry, boxes = self.tensors[name]
        return boxes.meeting(None) or {_whole(entry): 0}

    def box_of(self, name: str, rank: int) -> Iterator[Bounds]:
        """Yield the boxes of a tensor that one rank writes; the work does not grow with the number of ranks."""
        entry, boxes = self.tensors[name]
        if not entry.numel:
            if rank == 0:
                yield _whole(entry)
        elif isinstance(boxes, EvenBoxes):
            box = boxes.held_by(rank)
            if boxes.is_written_by(rank) and 0 not in box[1]:
                yield box
        else:
            yield from (box for box, writer in boxes.meeting(None).items() if writer == rank)


def _whole(entry: TensorEntry) -> Bounds:
    return (0,) * len(entry.shape), entry.shape


def plan_write(content: CheckpointContent) -> list[PlannedFile]:
    """Plan the file of each rank that holds anything, and the metadata.

    Tensors are divided by rows, as ``fully_shard`` does; each row is written once, however many replicas there are.
    A tensor without rows is written by the first rank.

    Raises:
        FormatError: Two paths in the tree have the same name once their keys are joined, or a value cannot be pickled.
    """
    tree, shards = content.tree, content.ranks.shards
    if not isinstance(tree, dict):
        raise FormatError("A distributed checkpoint is a mapping of names; this is not one.")
    keys: dict[str, Keys] = {}
    tensors: dict[str, tuple[TensorEntry, Boxes]] = {}
    objects: dict[str, Archive] = {}
    for name, (path, leaf) in flatten_nested(tree, NestedKinds(is_ref, _mapping), FormatError).items():
        keys[name] = path
        if isinstance(leaf, TensorRef):
            entry = content.tensors[leaf.name]
            divided = 0 if entry.numel and entry.shape else None
            tensors[name] = entry, EvenBoxes(entry.shape, (shards,), (divided,), 0)
        else:
            objects[name] = plan_archive(leaf, {ref: content.tensors[ref] for ref in select_tensors(leaf)})
    items = Items(keys, tensors, objects, shards)
    files = [plan_rank(items, rank, content.save_id) for rank in range(shards)]
    return [*(file for file in files if file is not None), plan_metadata(items)]


def plan_rank(items: Items, rank: int, save_id: str) -> PlannedFile | None:
    """Plan the file of one rank; None if it writes nothing. The work does not grow with the number of ranks."""
    file = _File()
    for name in sorted(items.keys):  # ranks may hold them in different orders
        if name in items.tensors:
            for box in items.box_of(name, rank):
                file.add((name, box[0]), _TensorArchive(items.tensors[name][0].cut(*box)))
        elif rank == 0:
            file.add((name, None), items.objects[name])
    rules = items.rules if rank == 0 else None
    return file.planned(FILE.format(rank), save_id, rules) if file.archives else None


def plan_metadata(items: Items) -> PlannedFile:
    """Plan ``.metadata``, which lists what all ranks write."""
    ends: dict[int, int] = {}
    locations: dict[Item, Location] = {}
    tensors: dict[str, TensorInfo] = {}
    known: dict[tuple[str, Boxes], tuple[tuple[Bounds, int, int], ...]] = {}  # many tensors are divided alike

    def add(item: Item, rank: int, size: int) -> None:
        begin = _aligned(ends.get(rank, 0))
        locations[item] = Location(FILE.format(rank), begin, size)
        ends[rank] = begin + size

    for name in sorted(items.keys):
        if name not in items.tensors:
            add((name, None), 0, items.objects[name].size)
            continue
        entry, boxes = items.tensors[name]
        listed = known.get((entry.dtype, boxes)) if isinstance(boxes, EvenBoxes) else None
        if listed is None:
            found = items.boxes(name)
            listed = tuple((box, rank, _frame(entry.dtype, box[1]).size) for box, rank in found.items())
            if isinstance(boxes, EvenBoxes):
                known[entry.dtype, boxes] = listed
        for box, rank, size in listed:
            add((name, box[0]), rank, size)
        tensors[name] = TensorInfo(entry.dtype, entry.shape, tuple(box for box, _, _ in listed))
    data = _metadata(items.keys, tensors, locations)
    return PlannedFile(".metadata", len(data), (), lambda _: [(0, data)])


def _aligned(end: int) -> int:
    return end + -end % _ALIGNMENT


class _File:
    """The archives of one file, one after the other."""

    def __init__(self) -> None:
        self.archives: list[tuple[int, Archive | _TensorArchive]] = []
        self._items: list[tuple[Item, int, int]] = []
        self._end = 0

    def add(self, item: Item, archive: Archive | _TensorArchive) -> None:
        base = _aligned(self._end)
        self.archives.append((base, archive))
        self._items.append((item, base, archive.size))
        self._end = base + archive.size

    def planned(self, name: str, save_id: str, rules: Rules | None) -> PlannedFile:
        pieces = [archive.pieces(base) for base, archive in self.archives]
        flat = tuple(piece for group in pieces for piece in group)
        index = index_bytes(save_id, self._items, rules)
        return PlannedFile(name, self._end + len(index), flat, lambda crcs: self._blocks(pieces, crcs, index))

    def _blocks(
        self, pieces: list[tuple[Piece, ...]], crcs: Sequence[int], index: bytes
    ) -> Iterator[tuple[int, bytes]]:
        begin = 0
        for (base, archive), group in zip(self.archives, pieces, strict=True):
            yield from archive.blocks(base, crcs[begin : begin + len(group)])
            begin += len(group)
            end = base + archive.size
            yield end, bytes(-end % _ALIGNMENT) if end < self._end else index


_MAPPINGS = (
    ("collections", "Counter"),
    ("collections", "defaultdict"),
    ("addict.addict", "Dict"),
    ("mmengine.config.config", "ConfigDict"),
)
"""Classes that a pickle only describes, and that are mappings when torch's planner sees them."""


def _mapping(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, PickledObject) and (value.module, value.qualname) in _MAPPINGS:
        first = value.args[0] if value.args else None
        return {**(first if isinstance(first, dict) else {}), **dict(value.items)}
    return value if isinstance(value, dict) else None


class _TensorArchive:
    """One tensor as torch would save it, within a larger file."""

    __slots__ = ("_entry", "_frame")

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self._frame = _frame(entry.dtype, entry.shape)

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._frame.size

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
    size: int  # with the data, in bytes


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
    differences = _first_difference(before, other), _first_difference(after, another)
    return _Frame(before, differences[0], after, differences[1], archive.size)


def _first_difference(one: bytes, other: bytes) -> int:
    return next(at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right)


def _patched(data: bytes, at: int, crc: bytes) -> bytes:
    return data[:at] + crc + data[at + len(crc) :]


_METADATA = "torch.distributed.checkpoint.metadata"
_NONE, _FALSE = b"N", b"\x89"


def _metadata(names: Mapping[str, Keys], tensors: Mapping[str, TensorInfo], locations: Locations) -> bytes:
    """Return the content of ``.metadata``. An attribute that torch ignores says which keys are integers."""
    writer = PickleWriter()

    def kind(name: str, module: str = _METADATA) -> bytes:
        return writer.keep(name_opcodes(module, name))

    def keys(*texts: str) -> list[bytes]:
        return [writer.keep(text_opcodes(text)) for text in texts]

    properties = {dtype: _properties(writer, dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    size_kind, index, chunk = kind("Size", "torch"), kind("MetadataIndex"), kind("ChunkStorageMetadata")
    tensor_kind, object_kind = kind("TensorStorageMetadata"), kind("BytesStorageMetadata")
    location_kind = kind("_StorageInfo", "torch.distributed.checkpoint.filesystem")
    of_tensor, of_box = keys("properties", "size", "chunks"), keys("offsets", "sizes")
    of_index, of_location = keys("fqn", "offset", "index"), keys("relative_path", "offset", "length")
    files = dict.fromkeys(location.file for location in locations.values())
    file_texts = dict(zip(files, keys(*files), strict=True))

    @cache
    def size(numbers: tuple[int, ...]) -> bytes:
        return _called(size_kind, _tuple(map(int_opcodes, numbers)))

    @cache
    def chunk_of(box: Bounds) -> bytes:
        return _restored(chunk, _dict(zip(of_box, map(size, box), strict=True)))

    def described(tensor: TensorInfo | None) -> bytes:
        if tensor is None:
            return _restored(object_kind, _dict(()))
        boxes = b"".join(map(chunk_of, tensor.boxes))
        values = properties[tensor.dtype], size(tensor.shape), b"](" + boxes + b"e"
        return _restored(tensor_kind, _dict(zip(of_tensor, values, strict=True)))

    def stored() -> Iterable[tuple[bytes, bytes]]:
        counts: dict[str, int] = {}
        for (name, offsets), location in locations.items():
            number = counts[name] = counts.get(name, -1) + 1  # boxes are listed in the order of their tensor
            box = (_NONE, _NONE) if offsets is None else (size(offsets), int_opcodes(number))
            where = file_texts[location.file], int_opcodes(location.offset), int_opcodes(location.length)
            yield (
                _restored(index, _dict(zip(of_index, (text_opcodes(name), *box), strict=True))),
                _restored(location_kind, _dict(zip(of_location, where, strict=True))),
            )

    def path(parts: Iterable[str | int]) -> bytes:
        return _tuple(text_opcodes(part) if isinstance(part, str) else int_opcodes(part) for part in parts)

    content = {
        "state_dict_metadata": _dict((text_opcodes(name), described(tensors.get(name))) for name in names),
        "planner_data": _dict((text_opcodes(name), path(parts)) for name, parts in names.items()),
        "storage_data": _dict(stored()),
        "storage_meta": _NONE,
        "version": text_opcodes("1.0.0"),
    }
    integers = {name: found for name, parts in names.items() if (found := integer_keys(parts))}
    if integers:
        content[INTEGER_KEYS] = _dict(
            (text_opcodes(name), _tuple(map(int_opcodes, positions))) for name, positions in integers.items()
        )
    state = _dict((text_opcodes(name), value) for name, value in content.items())
    return writer.complete(_restored(kind("Metadata"), state))


def _properties(writer: PickleWriter, dtype: str) -> bytes:
    layout, memory = name_opcodes("torch.serialization", "_get_layout"), name_opcodes(_METADATA, "_MEM_FORMAT_ENCODING")
    parts = (
        name_opcodes("torch", torch_name(dtype)),
        _called(layout, text_opcodes("torch.strided")),
        _FALSE,  # requires_grad
        _called(memory, int_opcodes(0)),
        _FALSE,  # pin_memory
    )
    return writer.keep(_restored(name_opcodes(_METADATA, "TensorProperties"), _tuple(parts)))


def _called(function: bytes, argument: bytes) -> bytes:
    return function + b"(" + argument + b"tR"


def _restored(kind: bytes, state: bytes) -> bytes:
    # kind.__new__(kind), restored from the state
    return kind + b")\x81" + state + b"b"


def _tuple(values: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(values) + b"t"


def _dict(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(part for pair in pairs for part in pair) + b"u"
