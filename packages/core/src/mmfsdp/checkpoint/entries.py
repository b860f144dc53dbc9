"""Tensors of a checkpoint: stored in chunks, folded from many, or computed while they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmfsdp.basics.boxes import Bounds, ListedBoxes, meet
from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.chunks import Chunk, Unlocated
from mmfsdp.checkpoint.failed_downloads import explained
from mmfsdp.errors import CheckpointError

__all__ = ["ComputedEntry", "FoldedEntry", "TensorEntry"]


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
            try:
                return self.stored.locate(self.stored.boxes.meeting(None))
            except CheckpointError as error:
                raise explained(error) from error.__cause__
        return self.stored

    def within(self, box: Bounds) -> TensorEntry:
        """Return the tensor with only the chunks that share an element with ``box``. No file is read."""
        stored: tuple[Chunk, ...] | Unlocated
        if isinstance(self.stored, Unlocated):
            stored = replace(self.stored, boxes=ListedBoxes(self.stored.boxes.meeting(box)))
        else:
            stored = tuple(chunk for chunk in self.stored if chunk.numel and meet(chunk.bounds, box))
        return replace(self, stored=stored)

    def stored_parts(self) -> Iterator[TensorEntry]:
        """Yield the tensors of files that it is made of: itself, if it is not computed."""
        yield self

    def counting(self, overflow: Callable[[int], None]) -> TensorEntry:
        """Return the tensor with this ``overflow`` in place of its own; itself if it rounds nothing.

        Args:
            overflow: Called with the number of elements that are too large.
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
        """Return the tensors from which it is computed, if they are read one after the other."""
        return ()

    def parts_together(self) -> tuple[TensorEntry, ...]:
        """Return the tensors from which it is computed, if a block of each is read in turn."""
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
