"""Reads directories of safetensors files without an index: a single file, or one or more per rank as torch writes.

``HuggingFaceStorageWriter(save_distributed=True)`` leaves files that each hold boxes of the tensors; where a box begins
is in the header, under ``DCP_SHARDING_INFO``: torch/distributed/checkpoint/_hf_utils.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mmfsdp.checkpoint.formats import safetensors
from mmfsdp.checkpoint.formats.registry import Source
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef
from mmfsdp.checkpoint.untrusted import inside, parse_json
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["box_offsets", "read"]

_SHARDING_INFO = "DCP_SHARDING_INFO"
"""Key in the header's ``__metadata__`` under which the offsets of the boxes lie, as JSON."""

_RANK_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_PART_FILE = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_MAX_FILES = 1_000_000


def read(source: Source) -> Layout:
    """Read the layout of a directory of safetensors files without an index.

    Either it is a single file, or the files of each rank that torch's DCP left. How many ranks there were is not
    written anywhere: if the files of the last ranks are missing altogether, only the boxes that are there are known.

    Raises:
        CheckpointNotFoundError: There is no safetensors file.
        IncompleteCheckpointError: Files are missing, as far as the names of the others tell.
        CorruptCheckpointError: A file is damaged, or does not fit the others.
        FormatError: The files are something else.
    """
    path = source.path
    names = [name for name in source.names if name.endswith(".safetensors")]
    if not names:
        raise CheckpointNotFoundError(f"{path.name} holds no safetensors file.", file=str(path))
    files = [inside(path, name, path) for name in names]
    if len(files) == 1 and not _RANK_FILE.fullmatch(names[0]):
        _check_parts(path, names)
        layout = safetensors.read(Source(files[0]))
        return Layout(path, "safetensors", 1, layout.tensors, layout.tree)
    ranks = _check_ranks(path, names)
    tensors: dict[str, list[TensorEntry]] = {}
    for file in files:
        entries, metadata = safetensors.read_entries(file)
        offsets = box_offsets(file, metadata)
        for name, entry in entries.items():
            tensors.setdefault(name, []).append(_moved(entry, offsets))
    joined = {name: _joined(name, parts) for name, parts in tensors.items()}
    return Layout(path, "safetensors_ranks", ranks, joined, {name: TensorRef(name) for name in joined})


def box_offsets(file: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return where in its tensor each box of a file begins.

    Args:
        file: The file, for messages.
        metadata: The ``__metadata__`` of its header.

    Raises:
        FormatError: It does not say.
        CorruptCheckpointError: What it says is malformed.
    """
    if _SHARDING_INFO not in metadata:
        raise FormatError(
            f"{file.name} is one of several safetensors files without an index, and its header does not say which part "
            f"it holds ({_SHARDING_INFO} is missing). Open the single file, or add model.safetensors.index.json.",
            file=str(file),
        )
    try:
        content = parse_json(metadata[_SHARDING_INFO])
        offsets = {name: tuple(value["saved_offsets"]) for name, value in content.items()}
        if any(type(number) is not int or not 0 <= number < 1 << 62 for value in offsets.values() for number in value):
            raise ValueError("offsets are not numbers")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{_SHARDING_INFO} of {file.name} is damaged: {type(error).__name__}: {error}.", file=str(file)
        ) from error
    return offsets


def _moved(entry: TensorEntry, offsets: Mapping[str, tuple[int, ...]]) -> TensorEntry:
    chunk = entry.chunks()[0]
    begin = offsets.get(entry.name)
    if begin is None or len(begin) != len(entry.shape):
        raise CorruptCheckpointError(
            f"{chunk.file.name} does not say where in tensor {entry.name!r} its box begins.", file=str(chunk.file)
        )
    moved = Chunk(chunk.file, chunk.offset, chunk.nbytes, begin, chunk.box_sizes)
    return TensorEntry(entry.name, entry.dtype, entry.shape, (moved,))


def _joined(name: str, parts: list[TensorEntry]) -> TensorEntry:
    first = parts[0]
    for part in parts[1:]:
        if part.dtype != first.dtype or len(part.shape) != len(first.shape):
            one, two = first.chunks()[0].file, part.chunks()[0].file
            raise CorruptCheckpointError(
                f"Tensor {name!r} is {first.dtype} of {len(first.shape)} dimensions in {one.name} but {part.dtype} of "
                f"{len(part.shape)} in {two.name}.",
                file=str(two),
            )
    chunks = [part.chunks()[0] for part in parts]
    # Nothing else says how large the whole is; torch's own reader takes it from the boxes too. An empty box of a rank
    # beyond the last row may begin anywhere.
    held = [chunk for chunk in chunks if chunk.numel] or chunks[:1]
    ends = zip(*(map(sum, zip(chunk.box_offsets, chunk.box_sizes, strict=True)) for chunk in held), strict=True)
    shape = tuple(max(end) for end in ends)
    boxes = {(chunk.box_offsets, chunk.box_sizes): chunk for chunk in reversed(held) if chunk.numel}
    return TensorEntry(name, first.dtype, shape, tuple(reversed(boxes.values())))


def _check_ranks(path: Path, names: list[str]) -> int:
    """Check as far as file names allow that no rank's file is missing; return the number of ranks."""
    found = [(name, match) for name in names if (match := _RANK_FILE.fullmatch(name))]
    if len(found) != len(names):
        _check_parts(path, names)
        return len(names)
    ranks = max(int(match[1]) for _, match in found)
    present = {int(match[1]) for _, match in found}
    if ranks > _MAX_FILES or ranks != len(present):
        missing = next((rank for rank in range(1, min(ranks, _MAX_FILES)) if rank not in present), ranks)
        raise IncompleteCheckpointError(
            f"{path.name} holds {found[-1][0]} but no file of shard {missing:05d}.", file=str(path)
        )
    return ranks


def _check_parts(path: Path, names: list[str]) -> None:
    for name in names:
        match = _PART_FILE.fullmatch(name)
        if match and int(match[3]) > len(names):
            raise IncompleteCheckpointError(
                f"{path.name} holds {name}, one of {int(match[3])} files, but {len(names)} of them "
                f"{'is' if len(names) == 1 else 'are'} there, and no index.",
                file=str(path / name),
            )
