"""Reads the directories of torch's distributed checkpoint (DCP): ``.metadata`` and ``*.distcp`` files.

Each stored tensor is a complete ``torch.save`` archive within a ``.distcp`` file, at the offset in the metadata; with
``SerializationFormat.SAFETENSORS`` the tensors of a file are one safetensors file at its end instead. Values that are
not tensors are ``torch.save`` archives in both: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import ListedBoxes
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.formats.dcp_metadata import Box, DcpMetadata, Location, read_dcp_metadata
from mmfsdp.checkpoint.formats.pickled_tensors import PickledShards, PickledTensor
from mmfsdp.checkpoint.formats.registry import Source, looks_like_safetensors
from mmfsdp.checkpoint.formats.safetensors import read_entries
from mmfsdp.checkpoint.formats.safetensors_ranks import box_offsets
from mmfsdp.checkpoint.formats.similar_archives import SimilarArchives
from mmfsdp.checkpoint.formats.torch_zip import read_archive
from mmfsdp.checkpoint.formats.zip_archive import read_records
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef, Unlocated
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.checkpoint.untrusted import inside
from mmfsdp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    UnsafePickleError,
)

__all__ = ["read"]

_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def read(source: Source) -> Layout:
    """Read the layout of a DCP directory. Tensors in its files are located only when their chunks are asked for.

    Raises:
        IncompleteCheckpointError: A file is missing. ``check_coverage`` finds tensors that lack chunks.
        CorruptCheckpointError: The metadata is damaged, or contradicts the files.
        FormatError: The checkpoint was saved compressed, or names files outside of the directory.
        UnsafePickleError: A pickle names something that is not on the list of safe names.
    """
    directory, trust = source.path, source.trust
    if not (directory / ".metadata").exists():
        raise CheckpointNotFoundError(
            f"{directory.name} has no .metadata, which torch's DCP writes last.", file=str(directory)
        )
    metadata = read_dcp_metadata(inside(directory, ".metadata", directory), trust=trust)
    items = _Items(directory, metadata, trust)
    tensors: dict[str, TensorEntry] = {}
    tree: dict[Any, Any] = {}
    for name in metadata.names:
        keys = metadata.paths[name]
        path = "/".join(map(str, keys))
        if name in metadata.tensors:
            unique = unique_name(path, tensors)
            tensors[unique] = _tensor(name, unique, metadata, items)
            _insert(tree, keys, TensorRef(unique), len(metadata.names), directory)
        else:
            value = _object(directory, name, path, metadata.locations.get((name, None)), items, tensors)
            _insert(tree, keys, value, len(metadata.names), directory)
    files = sorted({location.file for location in metadata.locations.values()})
    ranks = [int(match[1]) for file in files if (match := _RANK.fullmatch(file))]
    world_size = max(ranks) + 1 if len(ranks) == len(files) and ranks else max(len(files), 1)
    return Layout(directory, "dcp", world_size, tensors, tree)


def _tensor(name: str, unique: str, metadata: DcpMetadata, items: _Items) -> TensorEntry:
    info = metadata.tensors[name]
    boxes: dict[Box, Location] = {}
    for box in info.boxes:
        location = metadata.locations.get((name, box[0]))
        if location is not None and 0 not in box[1]:
            boxes[box] = location
    stored = Unlocated(ListedBoxes(boxes), functools.partial(items.chunks, name, info.dtype))
    return TensorEntry(unique, info.dtype, info.shape, stored)


def _object(
    directory: Path, name: str, path: str, location: Location | None, items: _Items, tensors: dict[str, TensorEntry]
) -> Any:
    """Return a value that is not a tensor, with its inner tensors added to ``tensors``."""
    if location is None:
        raise IncompleteCheckpointError(
            f"The metadata does not say where {name!r} is stored.", file=str(directory / ".metadata")
        )

    def bind(inner: str, leaf: Any) -> Any:
        if isinstance(leaf, PickledShards):
            raise FormatError(f"{name!r} in {location.file} holds one rank's part of a tensor.", file=location.file)
        if not isinstance(leaf, PickledTensor):
            return leaf
        unique = unique_name(f"{path}/{inner}" if inner else path, tensors)
        tensors[unique] = TensorEntry(unique, leaf.dtype, leaf.shape, (leaf.chunk((0,) * len(leaf.shape)),))
        return TensorRef(unique, leaf.parameter)

    return map_leaves(items.load(name, location), bind)


def _insert(tree: dict[Any, Any], keys: tuple[str | int, ...], value: Any, limit: int, directory: Path) -> None:
    """Set a value under nested keys as torch's planner does: an integer is a place in a list."""
    container: Any = tree
    for key, following in itertools.zip_longest(keys, keys[1:]):
        fits = isinstance(container, list if isinstance(key, int) else dict) and (isinstance(key, str) or key < limit)
        if fits and isinstance(container, list):
            container.extend([None] * (int(key) + 1 - len(container)))
        held = None if not fits or (isinstance(container, dict) and key not in container) else container[key]
        if not fits or (following is None and held is not None):
            raise CorruptCheckpointError(
                f".metadata is damaged: the keys {keys!r} do not fit the others.", file=str(directory / ".metadata")
            )
        if held is None:
            held = value if following is None else [] if isinstance(following, int) else {}
            container[key] = held
        container = held


class _Items:
    """The stored items of a DCP directory. Files that were read from stay open as long as this is in use.

    Args:
        directory: The directory.
        metadata: Its metadata.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.

    Raises:
        IncompleteCheckpointError: A file is missing.
        CorruptCheckpointError: An item reaches past the end of its file, or into another item.
        FormatError: A file is outside of the directory.
    """

    def __init__(self, directory: Path, metadata: DcpMetadata, trust: bool) -> None:
        self._directory, self._trust = directory, trust
        self._files: dict[str, Path] = {}
        self._prepare()
        sizes: dict[str, int] = {}
        for (name, _), location in metadata.locations.items():
            if location.file not in self._files:
                path = inside(directory, location.file, directory / ".metadata")
                if not path.is_file():
                    raise IncompleteCheckpointError(
                        f"{location.file}, which holds {name!r}, is missing.", file=str(path)
                    )
                self._files[location.file], sizes[location.file] = path, path.stat().st_size
        self._check_extents(metadata, sizes)

    def _prepare(self) -> None:
        self._open = OpenFiles()
        weakref.finalize(self, self._open.close)
        self._lock = threading.Lock()
        self._found: dict[tuple[str, Box], Chunk] = {}
        self._similar = SimilarArchives()
        self._appended: dict[tuple[Path, int], dict[str, tuple[TensorEntry, tuple[int, ...]]]] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        # One rank reads the metadata and sends the others the locations of what they need.
        return self._directory, self._trust

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._directory, self._trust = state
        self._files = {}
        self._prepare()

    def chunks(self, name: str, dtype: str, boxes: Mapping[Box, Location]) -> tuple[Chunk, ...]:
        """Locate the chunk of each box of a tensor, and remember it. Threads may call this at the same time.

        Args:
            name: Flat name of the tensor.
            dtype: The dtype that it should have.
            boxes: Its boxes, none of them empty, and where they are stored.

        Raises:
            CorruptCheckpointError, FormatError, UnsafePickleError, IncompleteCheckpointError: The file holds
                something else.
        """
        with self._lock:
            for box, where in boxes.items():
                if (name, box) not in self._found:
                    self._found[name, box] = self._chunk(name, dtype, box, where)
            return tuple(self._found[name, box] for box in boxes)

    def load(self, name: str, location: Location) -> Any:
        """Return the content of an archive: a ``PickledTensor``, or a value with such tensors in it.

        Raises:
            CorruptCheckpointError, FormatError, UnsafePickleError: It cannot be read.
        """
        path = self._path(location.file)
        begin, end = location.offset, location.offset + location.length
        source = self._open.descriptor(path)
        try:
            records = read_records(path, begin, end, source)
            content = read_archive(path, source, records, trust=self._trust)
        except (CorruptCheckpointError, FormatError, UnsafePickleError) as error:
            raise type(error)(f"{name!r}: {error.message}", **error.context) from error
        if isinstance(content, PickledTensor):
            self._similar.remember(source, begin, end, records, content)
        return content

    def _path(self, file: str) -> Path:
        if file not in self._files:
            self._files[file] = inside(self._directory, file, self._directory / ".metadata")
        return self._files[file]

    def _chunk(self, name: str, dtype: str, box: Box, location: Location) -> Chunk:
        path = self._path(location.file)
        begin, end = location.offset, location.offset + location.length
        known = self._similar.find(self._open.descriptor(path), path, begin, end)
        if known is not None:
            chunk, found = known.chunk(box[0]), known.dtype
        elif self._is_safetensors(path, location.offset):
            chunk, found = self._in_safetensors(path, name, box, location)
        else:
            stored = self.load(name, location)
            if not isinstance(stored, PickledTensor):
                raise CorruptCheckpointError(
                    f"{path.name} does not hold a tensor where {name!r} should be.",
                    file=str(path),
                    offset=location.offset,
                )
            chunk, found = stored.chunk(box[0]), stored.dtype
        if found != dtype or chunk.box_sizes != box[1]:
            raise CorruptCheckpointError(
                f"{path.name} holds {found} of size {list(chunk.box_sizes)} for tensor {name!r} at {list(box[0])} "
                f"(expected {dtype} of size {list(box[1])}).",
                file=str(path),
                offset=location.offset,
            )
        return chunk

    def _is_safetensors(self, path: Path, offset: int) -> bool:
        if (path, offset) in self._appended:
            return True
        return looks_like_safetensors(os.pread(self._open.descriptor(path), 9, offset))

    def _in_safetensors(self, path: Path, name: str, box: Box, location: Location) -> tuple[Chunk, str]:
        key = path, location.offset
        if key not in self._appended:
            entries, metadata = read_entries(path, begin=location.offset)
            offsets = box_offsets(path, metadata)
            self._appended[key] = {item: (entry, offsets.get(item, ())) for item, entry in entries.items()}
        entry, offsets_found = self._appended[key].get(name, (None, ()))
        if entry is None or offsets_found != box[0]:
            # torch's writer keeps one box per name and file: a second one of a rank is lost when it is written.
            raise IncompleteCheckpointError(
                f"{path.name} lacks the box of tensor {name!r} at {list(box[0])}.",
                file=str(path),
                offset=location.offset,
            )
        chunk = entry.chunks()[0]
        return Chunk(path, chunk.offset, chunk.nbytes, box[0], chunk.box_sizes), entry.dtype

    def _check_extents(self, metadata: DcpMetadata, sizes: Mapping[str, int]) -> None:
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for (name, _), location in metadata.locations.items():
            path, size = self._files[location.file], sizes[location.file]
            end = location.offset + location.length
            if end > size:
                raise CorruptCheckpointError(
                    f"{path.name} is truncated: {name!r} reaches to byte {end}, but the file has {size} bytes.",
                    file=str(path),
                    offset=location.offset,
                )
            by_file.setdefault(location.file, []).append((location.offset, end, name))
        for file, extents in by_file.items():
            path = self._files[file]
            for (begin, end, name), (other, _, neighbour) in itertools.pairwise(sorted(extents)):
                # The tensors of an appended safetensors file all name its beginning.
                if other < end and not (other == begin and self._is_safetensors(path, begin)):
                    raise CorruptCheckpointError(
                        f"{name!r} and {neighbour!r} overlap in {path.name}.", file=str(path), offset=other
                    )
