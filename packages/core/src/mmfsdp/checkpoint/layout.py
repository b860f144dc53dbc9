"""The layout of a checkpoint, whatever its format: tensors, and the extents of files that hold or will hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.boxes import Bounds, Boxes, ListedBoxes, meet
from mmfsdp.basics.dtypes import canonical_dtype, itemsize

if TYPE_CHECKING:
    import torch.nn as nn

__all__ = [
    "Chunk",
    "ComputedEntry",
    "FoldedEntry",
    "Layout",
    "Piece",
    "PlannedFile",
    "Record",
    "TensorEntry",
    "TensorRef",
    "Unlocated",
    "layout_of_model",
    "row_major_strides",
    "simplified_strides",
]


@dataclass(frozen=True, slots=True)
class Record:
    """An extent of a file that has its own checksum, such as one entry of a zip archive."""

    file: Path
    """The file that contains it."""
    offset: int
    """Offset of its data in the file, in bytes."""
    nbytes: int
    """Length of its data in bytes."""
    crc32: int | None
    """CRC-32 of its data; ``None`` where the writer computed none."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of one tensor, and the bytes that hold it."""

    file: Path
    """The file that contains it."""
    offset: int
    """Offset of its first element in the file, in bytes."""
    nbytes: int
    """Bytes that the elements of the box take when packed."""
    box_offsets: tuple[int, ...]
    """Offsets of the box in the tensor, in elements, one per dimension."""
    box_sizes: tuple[int, ...]
    """Size of the box in elements, one per dimension."""
    strides: tuple[int, ...] | None = None
    """Steps in elements between neighbours in the file; ``None`` for packed row-major order."""
    record: Record | None = None
    """The record that contains the bytes, if there is one. It may be larger than the chunk."""

    @property
    def crc32(self) -> int | None:
        """CRC-32 of exactly the bytes of this chunk, where one is stored."""
        record = self.record
        if record is None or self.strides is not None or (record.offset, record.nbytes) != (self.offset, self.nbytes):
            return None
        return record.crc32

    @property
    def bounds(self) -> Bounds:
        """The box."""
        return self.box_offsets, self.box_sizes

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.box_sizes)

    @property
    def span(self) -> int:
        """Bytes between the first byte and the last that the box touches in the file, both included."""
        if self.strides is None or self.numel == 0:
            return self.nbytes
        item = self.nbytes // self.numel
        return item * (1 + sum((size - 1) * step for size, step in zip(self.box_sizes, self.strides, strict=True)))

    def shared(self, offsets: Sequence[int], sizes: Sequence[int]) -> Bounds:
        """Return the box that it shares with another box of the tensor; a size is 0 where they do not meet."""
        low = tuple(map(max, self.box_offsets, offsets))
        ends = zip(self.box_offsets, self.box_sizes, offsets, sizes, strict=True)
        return low, tuple(max(0, min(a + b, c + d) - first) for first, (a, b, c, d) in zip(low, ends, strict=True))

    def cut(self, item: int, offsets: Sequence[int], sizes: Sequence[int]) -> Chunk | None:
        """Return what it shares with a box of the tensor, as a chunk of that box; ``None`` if they do not meet.

        Args:
            item: Bytes per element.
            offsets: Where the box begins, in elements.
            sizes: Its size in elements.
        """
        low, size = self.shared(offsets, sizes)
        if 0 in size:
            return None
        steps = self.strides or row_major_strides(self.box_sizes)
        skipped = sum((a - b) * step for a, b, step in zip(low, self.box_offsets, steps, strict=True))
        return replace(
            self,
            offset=self.offset + skipped * item,
            nbytes=math.prod(size) * item,
            box_offsets=tuple(a - b for a, b in zip(low, offsets, strict=True)),
            box_sizes=size,
            strides=simplified_strides(size, steps),
        )


@dataclass(frozen=True, slots=True)
class Unlocated:
    """Chunks whose offsets are still unknown, because finding them means reading each file, as in DCP."""

    boxes: Boxes
    """The boxes of the chunks."""
    locate: Callable[[Mapping[Bounds, Any]], tuple[Chunk, ...]]
    """Finds the chunks of some boxes and remembers them. It can be pickled, so that another rank can call it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint, and where its chunks are."""

    name: str
    """Keys that lead to it, joined with ``/``: ``'state_dict/backbone.conv.weight'``."""
    dtype: str
    """Canonical dtype name, such as ``'bfloat16'``."""
    shape: tuple[int, ...]
    """Global shape in elements."""
    stored: tuple[Chunk, ...] | Unlocated
    """Its chunks, or how to find them."""

    def chunks(self) -> tuple[Chunk, ...]:
        """Return the stored boxes that make up the tensor; this reads files if they have not been located yet.

        Raises:
            CheckpointError: A box is not where the checkpoint's metadata says.
        """
        if isinstance(self.stored, Unlocated):
            return self.stored.locate(self.stored.boxes.meeting(None))
        return self.stored

    def within(self, box: Bounds) -> TensorEntry:
        """Return the tensor with only the chunks that share an element with ``box``. No file is read."""
        stored: tuple[Chunk, ...] | Unlocated
        if isinstance(self.stored, Unlocated):
            stored = Unlocated(ListedBoxes(self.stored.boxes.meeting(box)), self.stored.locate)
        else:
            stored = tuple(chunk for chunk in self.stored if chunk.numel and meet(chunk.bounds, box))
        return replace(self, stored=stored)

    def stored_parts(self) -> Iterator[TensorEntry]:
        """Yield the tensors of files that it is made of: itself, if it is not computed."""
        yield self

    def counting(self, overflow: Callable[[int], None]) -> TensorEntry:
        """Return the tensor, which calls this with the number of elements that are too large, if it rounds any.

        Args:
            overflow: Replaces what it would call.
        """
        return self

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> TensorEntry:
        """Return a box of the tensor as a tensor of its own; a box of one that is computed is computed as well.

        Args:
            offsets: Where the box begins, in elements.
            sizes: Its size in elements.
        """
        item = itemsize(self.dtype)
        parts = (chunk.cut(item, offsets, sizes) for chunk in self.chunks())
        return TensorEntry(self.name, self.dtype, tuple(sizes), tuple(part for part in parts if part is not None))

    def cast(self, dtype: str, overflow: Callable[[int], None]) -> ComputedEntry | None:
        """Return the tensor computed in another dtype, to which it is rounded at once; ``None`` if it is stored.

        Args:
            dtype: The dtype.
            overflow: Called with the number of elements that were too large for it, if there are any.
        """
        return None

    def blocks(self, files: Any) -> Iterator[memoryview] | None:
        """Return the tensor's bytes as they are computed; ``None`` if it is stored, and its chunks are to be read.

        Args:
            files: The ``OpenFiles`` to read with.
        """
        return None

    @property
    def is_computed(self) -> bool:
        """Whether it is computed while it is written."""
        return False

    def parts_in_turn(self) -> tuple[TensorEntry, ...]:
        """Return what it is computed from, if that is read one part after the other."""
        return ()

    def parts_together(self) -> tuple[TensorEntry, ...]:
        """Return what it is computed from, if a block of each part is read in turn."""
        return ()

    def repeats(self, dim: int) -> bool:
        """Tell whether elements along a dimension are the same bytes of a file, as in a view made by ``expand``."""
        chunks = self.chunks()
        return len(chunks) == 1 and chunks[0].strides is not None and chunks[0].strides[dim] == 0

    def has_same_source(self, other: TensorEntry) -> bool:
        """Tell whether the same bytes of files hold two tensors, or the same is computed from such."""
        return type(self) is type(other) and self.chunks() == other.chunks()

    def source_key(self) -> Hashable:
        """Return a key that is equal for two tensors exactly if they are views of the same bytes."""
        chunks = self.chunks()
        if len(chunks) == 1 and chunks[0].strides is None:
            # Whatever its shape: `weight` and `weight.view(-1)` are one storage.
            return self.dtype, chunks[0].file, chunks[0].offset, self.nbytes
        return self.dtype, self.shape, chunks

    def describe_source(self) -> Iterator[str]:
        """Yield lines that say which bytes of which files it is made of, and how."""
        yield f"{self.dtype} {self.shape}"
        for chunk in self.chunks():
            yield f"{chunk.file} {chunk.offset} {chunk.box_offsets} {chunk.box_sizes} {chunk.strides}"

    @property
    def num_chunks(self) -> int:
        """Number of its chunks."""
        return self.stored.boxes.count if isinstance(self.stored, Unlocated) else len(self.stored)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor when packed."""
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class FoldedEntry(TensorEntry):
    """A tensor whose axes were divided and reordered, so that its chunks are many; read whole, it is one with few."""

    folded: TensorEntry
    """The same elements in the same order under more dimensions, in fewer chunks."""

    def within(self, box: Bounds) -> TensorEntry:
        """Return the tensor with only the chunks that share an element with ``box``. No file is read."""
        return TensorEntry(self.name, self.dtype, self.shape, self.stored).within(box)

    def stored_parts(self) -> Iterator[TensorEntry]:
        yield replace(self.folded, name=self.name)


def _ignore(_: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ComputedEntry(TensorEntry):
    """A tensor that is computed block by block while it is written; its chunks are those that it is computed from."""

    parts: tuple[TensorEntry, ...]
    """The tensors that it is computed from."""
    overflow: Callable[[int], None] = field(default=_ignore, compare=False)
    """Called with the number of elements that were too large for the dtype, if there are any."""

    @property
    def formula(self) -> Hashable:
        """The formula of the parts; two tensors with equal formulas, parts and dtypes are equal."""
        return type(self).__name__

    def stored_parts(self) -> Iterator[TensorEntry]:
        for part in self.parts:
            yield from part.stored_parts()

    def counting(self, overflow: Callable[[int], None]) -> ComputedEntry:
        return self.cast(self.dtype, overflow)

    @property
    def is_computed(self) -> bool:
        return True

    def parts_together(self) -> tuple[TensorEntry, ...]:
        return self.parts

    def cut(self, offsets: Sequence[int], sizes: Sequence[int]) -> ComputedEntry:
        raise NotImplementedError

    def cast(self, dtype: str, overflow: Callable[[int], None]) -> ComputedEntry:
        return replace(self, dtype=dtype, overflow=overflow)

    def repeats(self, dim: int) -> bool:
        return False

    def has_same_source(self, other: TensorEntry) -> bool:
        if not isinstance(other, ComputedEntry):
            return False
        mine, theirs = ((entry.formula, entry.dtype, len(entry.parts)) for entry in (self, other))
        return mine == theirs and all(a.has_same_source(b) for a, b in zip(self.parts, other.parts, strict=True))

    def source_key(self) -> Hashable:
        # Two views of the same bytes with different dtypes no longer share them after a cast.
        return self.formula, self.dtype, *(part.source_key() for part in self.parts)

    def describe_source(self) -> Iterator[str]:
        yield f"{self.dtype} {self.shape} {self.formula!r}"
        for part in self.parts:
            yield from part.describe_source()

    def blocks(self, files: Any) -> Iterator[memoryview]:
        """Yield the tensor's bytes, packed in row-major order; the next block may overwrite the one before.

        Args:
            files: The ``OpenFiles`` to read the parts with.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Marks the position of a tensor in a checkpoint's tree."""

    name: str
    """The name of the ``TensorEntry``."""
    parameter: bool | None = None
    """``requires_grad`` if it was stored as an ``nn.Parameter``; ``None`` for a plain tensor."""


@dataclass(frozen=True)
class Layout:
    """A checkpoint as read: its nested content, and where every tensor is on disk.

    Reading a layout touches metadata only; no tensor data is read. A layout may keep files open while it is in use.
    """

    path: Path
    """The file or directory that was opened."""
    format: str
    """Name of the format, as `known_formats` lists it."""
    world_size: int
    """Number of ranks that wrote it; 1 for a single file."""
    tensors: Mapping[str, TensorEntry]
    """Name to tensor, in the order of the tree."""
    tree: Any = field(repr=False)
    """The nested content with each tensor replaced by a ``TensorRef``. Treat it as read-only."""
    origins: tuple[Layout, ...] = field(default=(), repr=False)
    """The checkpoints that it is computed from; none if it was read."""
    weights_beside: Callable[[], Sequence[str]] = field(default=tuple, repr=False, compare=False)
    """Finds checkpoints beside one of an optimizer, for an error that says where the weights may be."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together; tied tensors count once per name."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def is_flat(self) -> bool:
        """Whether the content is a bare state dict: names to tensors, without a level of keys above."""
        return (
            isinstance(self.tree, dict)
            and any(isinstance(value, TensorRef) for value in self.tree.values())
            and not any(isinstance(value, dict) for value in self.tree.values())
        )

    @property
    def top_level(self) -> list[str]:
        """The top-level keys, as strings; empty if the content is not a mapping."""
        return [str(key) for key in self.tree] if isinstance(self.tree, dict) else []

    def tensors_below(self, key: str) -> dict[str, TensorEntry]:
        """Return the tensors under a top-level key by their name relative to it.

        Args:
            key: A top-level key such as ``'state_dict'``. A key without tensors gives an empty result.
        """
        prefix = f"{key}/"
        return {name.removeprefix(prefix): entry for name, entry in self.tensors.items() if name.startswith(prefix)}

    def content(self) -> dict[str, dict[str, Any]]:
        """Return what lies under each top-level key, as plain values; empty for a bare state dict.

        ``{'tensors': 12, 'bytes': 4096}`` where there are tensors, ``{'values': 3, 'names': [...]}`` for a dict (the
        first eight names), ``{'values': 3}`` for a list, ``{'value': 7}`` for anything else. Tensors without a key of
        their own share an empty key.
        """
        if self.is_flat or not isinstance(self.tree, dict):
            return {}
        refs = [value for value in self.tree.values() if isinstance(value, TensorRef)]
        lines = {"": {"tensors": len(refs), "bytes": sum(self.tensors[ref.name].nbytes for ref in refs)}}
        parts = {key: value for key, value in self.tree.items() if not isinstance(value, TensorRef)}
        return (lines if refs else {}) | {str(key): self._summary(str(key), value) for key, value in parts.items()}

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON, with every tensor."""
        tensors = [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "chunks": entry.num_chunks,
                "bytes": entry.nbytes,
            }
            for entry in self.tensors.values()
        ]
        return {
            "path": str(self.path),
            "format": self.format,
            "world_size": self.world_size,
            "num_tensors": len(tensors),
            "total_bytes": self.nbytes,
            "content": self.content(),
            "tensors": tensors,
        }

    def _summary(self, key: str, value: Any) -> dict[str, Any]:
        if below := self.tensors_below(key):
            return {"tensors": len(below), "bytes": sum(entry.nbytes for entry in below.values())}
        if isinstance(value, dict):
            return {"values": len(value), "names": [str(name) for name in [*value][:8]]}
        if isinstance(value, list | tuple | set | frozenset):
            return {"values": len(value)}
        if value is None or isinstance(value, bool | int | float):
            return {"value": value}
        text = value if isinstance(value, str) else repr(value)
        return {"value": text if len(text) <= 80 else f"{text[:77]}..."}

    def files(self) -> Iterator[Path]:
        """Yield each file that holds tensor data, once, in order of first use."""
        seen = dict.fromkeys(chunk.file for entry in self.tensors.values() for chunk in entry.chunks())
        yield from seen


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or a box of one, at its place in a file that will be written."""

    entry: TensorEntry
    """The tensor; it is written packed in row-major order."""
    at: int
    """Where its first element goes, in bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that will be written."""

    name: str
    """Its path within the target; empty where the target is this one file."""
    size: int
    """Its length in bytes."""
    pieces: tuple[Piece, ...]
    """The tensor data, in file order."""
    blocks: Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]
    """Given the CRC-32 of each piece, returns all other bytes with their offsets, in file order. Bytes in neither are
    zero."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(piece.entry.nbytes for piece in self.pieces)


def row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the steps in elements between neighbours of a packed row-major box of these sizes."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)


@lru_cache(4096)  # a model has few distinct shapes
def simplified_strides(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides, or ``None`` if they are those of a packed row-major box.

    The step along a dimension of one element means nothing; torch leaves any number there.
    """
    matters = zip(sizes, strides, row_major_strides(sizes), strict=True)
    return None if 0 in sizes or all(size == 1 or step == packed for size, step, packed in matters) else strides


_NOWHERE = Path("(the model)")


def layout_of_model(model: nn.Module) -> Layout:
    """Return the parameters of a model as a layout to give as ``reference`` to `open_layout`. Not collective.

    It has no data: the offset of a chunk numbers the parameter, with the same number for tied names; its strides are
    those in memory.

    Args:
        model: Not sharded, on any device; ``meta`` is enough.

    Example:
        >>> with parameters_on_meta():
        ...     model = MyModel()
        >>> layout = open_layout("work_dirs/run/epoch_3.pth", reference=layout_of_model(model))
    """
    places: dict[int, int] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        place = places.setdefault(id(param), len(places))
        dtype, shape = canonical_dtype(param.dtype), tuple(param.shape)
        strides = None if param.is_contiguous() else tuple(param.stride())
        whole = Chunk(_NOWHERE, place, param.numel() * itemsize(dtype), (0,) * len(shape), shape, strides)
        tensors[name] = TensorEntry(name, dtype, shape, (whole,))
    return Layout(_NOWHERE, "model", 1, tensors, {name: TensorRef(name) for name in tensors})
