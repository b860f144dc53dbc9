"""Reads the directories of torch's distributed checkpoint (DCP): ``.metadata`` and ``*.distcp`` files.

Each stored tensor is a complete file of ``torch.save`` within a ``.distcp`` file, at the place that the metadata names;
with ``SerializationFormat.SAFETENSORS`` the tensors of a file are one safetensors file at its end instead. What is not
a tensor is a file of ``torch.save`` in both: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.formats.dcp_metadata import Box, DcpMetadata, Location, read_dcp_metadata
from mmfsdp.checkpoint.formats.safetensors_file import looks_like_safetensors, read_entries
from mmfsdp.checkpoint.formats.safetensors_index import box_offsets
from mmfsdp.checkpoint.formats.shard_index import inside
from mmfsdp.checkpoint.formats.sharded_tensors import StoredShards
from mmfsdp.checkpoint.formats.similar_archives import SimilarArchives
from mmfsdp.checkpoint.formats.stored_tensors import StoredTensor
from mmfsdp.checkpoint.formats.torch_zip import read_archive
from mmfsdp.checkpoint.formats.zip_archive import read_records
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.open_files import OpenFiles
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError, UnsafePickleError

__all__ = ["is_dcp", "read_dcp"]

_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def is_dcp(directory: Path) -> bool:
    """Tell whether a directory holds the metadata of a DCP checkpoint."""
    return (directory / ".metadata").is_file()


def read_dcp(directory: Path, *, trust: bool = False) -> Layout:
    """Read the layout of a DCP directory.

    Args:
        directory: The directory.
        trust: Keep unknown pickled objects as opaque placeholders instead of refusing them.

    Raises:
        IncompleteCheckpointError: A file is missing. A tensor that lacks chunks is found by ``check_coverage``.
        CorruptCheckpointError: The metadata is damaged, or what it says is not what the files hold.
        FormatError: It was saved compressed, or names files outside of the directory.
        UnsafePickleError: A pickle names something that is not on the list of safe names.
    """
    metadata = read_dcp_metadata(inside(directory, ".metadata", directory), trust=trust)
    with OpenFiles() as files:
        return _read(directory, metadata, _Reader(directory, metadata, trust, files))


def _read(directory: Path, metadata: DcpMetadata, reader: _Reader) -> Layout:
    reader.check_extents()
    tree: dict[Any, Any] = {}
    for name in metadata.names:
        keys = metadata.paths[name]
        path = "/".join(str(key) for key in keys)
        if name in metadata.tensors:
            entry = reader.tensor(name, unique_name(path, reader.tensors))
            reader.tensors[entry.name] = entry
            _insert(tree, keys, TensorRef(entry.name), len(metadata.names), directory)
        else:
            _insert(tree, keys, reader.object(name, path), len(metadata.names), directory)
    files = sorted({location.file for location in metadata.locations.values()})
    ranks = [int(match[1]) for file in files if (match := _RANK.fullmatch(file))]
    world_size = max(ranks) + 1 if len(ranks) == len(files) and ranks else max(len(files), 1)
    return Layout(directory, "dcp", world_size, reader.tensors, tree)


class _Reader:
    def __init__(self, directory: Path, metadata: DcpMetadata, trust: bool, files: OpenFiles) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self._directory = directory
        self._metadata = metadata
        self._trust = trust
        self._open = files
        self._similar = SimilarArchives()
        self._files: dict[str, tuple[Path, int]] = {}
        self._appended: dict[tuple[Path, int], dict[str, tuple[TensorEntry, tuple[int, ...]]]] = {}
        for (name, _), location in metadata.locations.items():
            if location.file not in self._files:
                path = inside(directory, location.file, directory / ".metadata")
                if not path.is_file():
                    raise IncompleteCheckpointError(
                        f"{location.file}, which holds {name!r}, is missing.", file=str(path)
                    )
                self._files[location.file] = path, path.stat().st_size

    def check_extents(self) -> None:
        """Check that stored items lie within their files and do not overlap."""
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for (name, _), location in self._metadata.locations.items():
            path, size = self._files[location.file]
            end = location.offset + location.length
            if end > size:
                raise CorruptCheckpointError(
                    f"{path.name} is truncated: {name!r} reaches to byte {end}, but the file has {size} bytes.",
                    file=str(path),
                    offset=location.offset,
                )
            by_file.setdefault(location.file, []).append((location.offset, end, name))
        for file, extents in by_file.items():
            path = self._files[file][0]
            for (begin, end, name), (other, _, neighbour) in itertools.pairwise(sorted(extents)):
                # The tensors of an appended safetensors file all name its beginning.
                if other < end and not (other == begin and self._is_safetensors(path, begin)):
                    raise CorruptCheckpointError(
                        f"{name!r} and {neighbour!r} overlap in {path.name}.", file=str(path), offset=other
                    )

    def tensor(self, name: str, unique: str) -> TensorEntry:
        """Find the data of each chunk of a tensor."""
        info = self._metadata.tensors[name]
        chunks: dict[Box, Chunk] = {}
        for box in info.boxes:
            location = self._metadata.locations.get((name, box[0]))
            if location is not None and 0 not in box[1]:
                chunks.setdefault(box, self._chunk(name, info.dtype, box, location))
        return TensorEntry(unique, info.dtype, info.shape, tuple(chunks.values()))

    def object(self, name: str, path: str) -> Any:
        """Read something that is not a tensor; tensors inside of it are taken up."""
        location = self._metadata.locations.get((name, None))
        if location is None:
            raise IncompleteCheckpointError(
                f"The metadata does not say where {name!r} is stored.", file=str(self._directory / ".metadata")
            )
        content = self._load(name, location)

        def bind(inner: str, leaf: Any) -> Any:
            if isinstance(leaf, StoredShards):
                raise FormatError(f"{name!r} in {location.file} holds one rank's part of a tensor.", file=location.file)
            if not isinstance(leaf, StoredTensor):
                return leaf
            unique = unique_name(f"{path}/{inner}" if inner else path, self.tensors)
            chunk = leaf.chunk((0,) * len(leaf.shape))
            self.tensors[unique] = TensorEntry(unique, leaf.dtype, leaf.shape, (chunk,))
            return TensorRef(unique, leaf.parameter)

        return map_leaves(content, bind)

    def _chunk(self, name: str, dtype: str, box: Box, location: Location) -> Chunk:
        path = self._files[location.file][0]
        begin, end = location.offset, location.offset + location.length
        known = self._similar.find(self._open.descriptor(path), path, begin, end)
        if known is not None:
            chunk, found = known.chunk(box[0]), known.dtype
        elif self._is_safetensors(path, location.offset):
            chunk, found = self._in_safetensors(path, name, box, location)
        else:
            stored = self._load(name, location)
            if not isinstance(stored, StoredTensor):
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

    def _load(self, name: str, location: Location) -> Any:
        path = self._files[location.file][0]
        begin, end = location.offset, location.offset + location.length
        source = self._open.descriptor(path)
        try:
            records = read_records(path, begin, end, source)
            content = read_archive(path, source, records, trust=self._trust)
        except (CorruptCheckpointError, FormatError, UnsafePickleError) as error:
            raise type(error)(f"{name!r}: {error.message}", **error.context) from error
        if isinstance(content, StoredTensor):
            self._similar.remember(source, begin, end, records, content)
        return content

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
        chunk = entry.chunks[0]
        return Chunk(path, chunk.offset, chunk.nbytes, box[0], chunk.box_sizes), entry.dtype


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
