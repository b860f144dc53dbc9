"""Reads DCP directories of mmfsdp by the rules in their first file, without ``.metadata``, and finds such rules.

The work does not grow with the number of ranks that saved, as reading ``.metadata`` does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds, EvenBoxes
from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.chunks import Chunk, Unlocated
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import SourcePath
from mmfsdp.checkpoint.formats.dcp.index import FILE, FileIndex, read_index
from mmfsdp.checkpoint.formats.dcp.items import DcpItems, Location
from mmfsdp.checkpoint.formats.dcp.metadata import insert_value, read_value
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.manifest import MANIFEST_NAME
from mmfsdp.checkpoint.manifest_search import check_size
from mmfsdp.checkpoint.tree import unique_name
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["read_by_rules", "rule_of"]


def read_by_rules(source: SourcePath) -> Layout | None:
    """Read the layout of a DCP directory from its first file; ``None`` if that does not describe the others.

    Other files are read when chunks in them are asked for.

    Raises:
        CheckpointError: The first file is damaged.
    """
    directory = source.path
    if is_remote(directory) or not (directory / FILE.format(0)).is_file():
        return None
    items = _RuledItems(directory, "", source.trust)
    found = items.index(0)
    if found is None or found.rules is None:
        return None
    items.save_id = found.save_id
    tensors: dict[str, TensorEntry] = {}
    tree: dict[Any, Any] = {}
    names = found.rules.names
    for name, named in names.items():
        path = "/".join(map(str, named.keys))
        value: Any
        if named.boxes is None:
            value = read_value(directory, name, path, found.items.get((name, None)), items.read, tensors)
        else:
            unique = unique_name(path, tensors)
            stored = Unlocated(named.boxes, functools.partial(items.chunks, name, named.dtype), FILE)
            tensors[unique] = TensorEntry(unique, named.dtype, named.boxes.shape, stored)
            value = TensorRef(unique)
        insert_value(tree, named.keys, value, len(names), directory)
    return Layout(directory, "dcp", found.rules.ranks, tensors, tree)


class _RuledItems:
    """Locates tensors in the files of ranks by what each file says of itself; it can be sent to other ranks."""

    def __init__(self, directory: Path, save_id: str, trust: bool) -> None:
        self.save_id = save_id
        self._directory, self._trust = directory, trust
        self.read = DcpItems(directory, {}, trust)
        self._known: dict[int, FileIndex] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        return self._directory, self.save_id, self._trust

    def __setstate__(self, state: tuple[Path, str, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def chunks(self, name: str, dtype: str, boxes: Mapping[Bounds, int]) -> tuple[Chunk, ...]:
        """Return where boxes of a tensor lie in the files of the ranks that wrote them.

        Raises:
            CheckpointError: A file is missing or damaged, of another save, or holds something else.
        """
        found: dict[Bounds, Location] = {}
        for box, rank in boxes.items():
            index, first = self._of_save(rank), FILE.format(0)
            if (name, box[0]) not in index.items:
                raise CorruptCheckpointError(
                    f"{FILE.format(rank)} does not hold tensor {name!r} at {list(box[0])}, as {first} says.",
                    file=str(self._directory / FILE.format(rank)),
                )
            found[box] = index.items[name, box[0]]
        return self.read.chunks(name, dtype, found)

    def index(self, rank: int) -> FileIndex | None:
        """Return what a rank's file says of itself, if it does."""
        path = inside(self._directory, FILE.format(rank), self._directory)
        try:
            with path.open("rb", buffering=0) as file:
                if (self._directory / MANIFEST_NAME).exists():
                    check_size(self._directory, path.name, os.fstat(file.fileno()).st_size)
                return read_index(path, file.fileno())
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(f"{path.name} is missing.", file=str(path)) from error

    def _of_save(self, rank: int) -> FileIndex:
        if rank not in self._known:
            found, path = self.index(rank), self._directory / FILE.format(rank)
            if found is None or found.save_id != self.save_id:
                said = (
                    "does not say which save it is of" if found is None else f"is of another save ({found.save_id!r})"
                )
                raise CorruptCheckpointError(
                    f"{path.name} {said}; {FILE.format(0)} is of save {self.save_id!r}.", file=str(path)
                )
            self._known[rank] = found
        return self._known[rank]


def rule_of(shape: tuple[int, ...], boxes: Iterable[tuple[Bounds, int]], ranks: int) -> EvenBoxes | None:
    """Return the rule by which ranks wrote the boxes of a tensor; ``None`` if there is no such rule.

    Args:
        shape: Shape of the whole tensor, in elements.
        boxes: The boxes, each with the rank that wrote it.
        ranks: How many ranks there are.
    """
    held = [(offsets, sizes, rank) for (offsets, sizes), rank in boxes if 0 not in sizes]
    if not held:
        return EvenBoxes(shape, (ranks,), (None,), 0) if 0 in shape else None
    offsets, sizes, first = min(held)
    if any(offsets):
        return None
    if sizes == shape:
        return EvenBoxes(shape, (ranks,), (None,), first) if len(held) == 1 else None
    dim = next(dim for dim, size in enumerate(sizes) if size != shape[dim])
    for shards in (count for count in range(1, ranks + 1) if ranks % count == 0):
        rows = -(-shape[dim] // shards)
        if rows != sizes[dim] or first % shards or len(held) != -(-shape[dim] // rows):
            continue
        expected = {
            ((*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1)), first + index): min(rows, shape[dim] - begin)
            for index, begin in enumerate(range(0, shape[dim], rows))
        }
        if all(
            expected.get((offsets, rank)) == sizes[dim] and (*sizes[:dim], shape[dim], *sizes[dim + 1 :]) == shape
            for offsets, sizes, rank in held
        ):
            mesh, placements = ((ranks // shards, shards), (None, dim)) if shards < ranks else ((ranks,), (dim,))
            return EvenBoxes(shape, mesh, placements, first // shards)
    return None
