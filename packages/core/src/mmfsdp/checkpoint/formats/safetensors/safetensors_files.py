"""Reads and plans safetensors files, and reads directories of them without an index, without torch or safetensors.

Format: eight bytes of header length (little endian), a JSON header, then the data without holes:
https://github.com/huggingface/safetensors#format. A directory holds a single file, or one or more per rank, as
``HuggingFaceStorageWriter(save_distributed=True)`` leaves them: each holds boxes of the tensors; where a box begins is
in the header, under ``DCP_SHARDING_INFO`` (torch/distributed/checkpoint/_hf_utils.py).
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.dtypes import from_safetensors_code, itemsize, numbers_per_element, safetensors_code
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.chunks import Chunk, Record
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.common.source import PART_FILE, CheckpointContent, SourcePath, one_of_many, part_names
from mmfsdp.checkpoint.integrity import inside, parse_json
from mmfsdp.checkpoint.layout import Layout, Piece, PlannedFile, TensorRef
from mmfsdp.checkpoint.pickles.unpickling import integers
from mmfsdp.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    UnknownDtypeError,
)

__all__ = ["CHECKSUMS", "box_offsets", "plan_file", "plan_write", "read", "read_entries", "read_ranks"]

CHECKSUMS = "mmfsdp.crc32"
"""Key of ``__metadata__`` for checksums: eight hexadecimal digits each, without anything between. The first is the
CRC-32 of the header's entries as JSON (no spaces, ASCII only), then of each tensor's data, in their order."""

_ALIGNMENT = 64  # bytes of a line of the processor's cache: what begins at one is read in three quarters of the time
_HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference implementation
_VALUES = 2_000_000  # in a header: 400,000 matrices; a value takes up to 200 bytes of memory


def read(source: SourcePath) -> Layout:
    """Read the layout of a safetensors file.

    Raises:
        UnknownDtypeError: A dtype is unknown here.
        FormatError: It is a single rank's part of a checkpoint.
        CorruptCheckpointError: The header is damaged, or the file shorter than it says.
    """
    path = source.path
    tensors, metadata = read_entries(path)
    if _SHARDING_INFO in metadata and (
        _RANK_FILE.fullmatch(path.name) or any(map(any, box_offsets(path, metadata).values()))
    ):
        raise one_of_many(path)
    return Layout(path, "safetensors", 1, tensors, {name: TensorRef(name) for name in tensors})


def read_entries(path: Path, begin: int = 0) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and what its ``__metadata__`` says.

    Args:
        path: The file.
        begin: Where the format begins, in bytes, if something is in front of it; it ends with the file.

    Raises:
        UnknownDtypeError: A dtype is unknown here.
        CorruptCheckpointError: The header is damaged, tensors overlap, or the file is shorter than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(begin)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, size - begin - 8):
            raise CorruptCheckpointError(
                f"The header of {path.name} is truncated or damaged.", file=str(path), offset=begin
            )
        raw = file.read(length)
    if raw.count(b",") > _VALUES:
        raise CorruptCheckpointError(
            f"The header of {path.name} holds {raw.count(b',')} values (expected at most {_VALUES}); no model has so "
            "many tensors in one file.",
            file=str(path),
            offset=begin + 8,
        )
    data = begin + 8 + length
    try:
        header = parse_json(raw)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ does not map strings to strings")
        crcs = _checksums(path, header, metadata[CHECKSUMS]) if CHECKSUMS in metadata else None
        tensors = {name: _entry(path, name, value, data) for name, value in header.items()}
        if crcs is not None:
            tensors = _records(path, tensors, crcs)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"The header of {path.name}", error, path, begin + 8) from error
    position = data
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].chunks()[0].offset, item[1].nbytes)):
        if entry.chunks()[0].offset != position:  # the format has neither holes nor overlaps
            raise CorruptCheckpointError(
                f"Tensor {name!r} of {path.name} begins at byte {entry.chunks()[0].offset} (expected {position}, where "
                "the one before it ends).",
                file=str(path),
                offset=entry.chunks()[0].offset,
            )
        position += entry.nbytes
    if position != size:
        raise CorruptCheckpointError(
            f"{path.name} has {size} bytes (expected {position}): it is "
            f"{'truncated' if size < position else 'too long'}.",
            file=str(path),
        )
    return tensors, metadata


def plan_write(content: CheckpointContent) -> list[PlannedFile]:
    """Plan one safetensors file; see `plan_file`."""
    return [plan_file("", content.named)]


def plan_file(name: str, tensors: Mapping[str, TensorEntry]) -> PlannedFile:
    """Plan one safetensors file.

    A file of this format cannot say that two names share memory, and safetensors' own ``save_file`` rejects tied
    weights. Here each name gets a copy of its own, which every reader accepts. The format has no checksums; the sums of
    the tensors are stored in ``__metadata__``, which other readers ignore (see ``CHECKSUMS``).

    Raises:
        ConfigError: The format cannot hold a dtype or a name.
    """
    # Large items first, as the reference writer does: then every tensor is aligned to its item.
    order = sorted(tensors, key=lambda name: (-itemsize(tensors[name].dtype), name))
    entries: dict[str, Any] = {}
    position = 0
    for tensor in order:
        if tensor == "__metadata__":
            raise ConfigError("A safetensors file cannot hold a tensor named '__metadata__'. Rename it.")
        end = position + tensors[tensor].nbytes
        code, shape = safetensors_code(tensors[tensor].dtype), list(tensors[tensor].shape)
        if (count := numbers_per_element(tensors[tensor].dtype)) > 1:
            if not shape:
                raise ConfigError(f"safetensors cannot hold {tensor!r}, a scalar of {tensors[tensor].dtype}.")
            shape[-1] *= count
        entries[tensor] = {"dtype": code, "shape": shape, "data_offsets": [position, end]}
        position = end
    begin = len(_header(entries, [0] * len(order)))
    if begin - 8 > _HEADER_LIMIT:
        raise ConfigError(
            f"{len(tensors)} tensors need a header of {begin - 8} bytes; safetensors allows {_HEADER_LIMIT}. Write "
            "a .pth file instead."
        )
    pieces = tuple(Piece(tensors[tensor], begin + entries[tensor]["data_offsets"][0]) for tensor in order)
    return PlannedFile(name, begin + position, pieces, lambda crcs: [(0, _header(entries, crcs))])


def _header(entries: Mapping[str, Any], crcs: Sequence[int]) -> bytes:
    """Return the length and the header; its length does not depend on the checksums."""
    checksums = "".join(f"{crc:08x}" for crc in (_entries_crc(entries), *crcs))
    header = {"__metadata__": {"format": "pt", CHECKSUMS: checksums}, **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _entries_crc(entries: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(entries, separators=(",", ":")).encode())


def _checksums(path: Path, raw: Mapping[str, Any], text: str) -> list[int]:
    """Return the tensors' checksums that the header gives, once its own is right."""
    digits = re.fullmatch(r"(?:[0-9a-f]{8})+", text)
    crcs = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)] if digits else []
    if len(crcs) != len(raw) + 1 or crcs[0] != _entries_crc(raw):
        raise CorruptCheckpointError(
            f"The checksums in the header of {path.name} are not those of the tensors that it lists: the header is "
            f"damaged, or a program changed the tensors and kept the metadata. It should drop {CHECKSUMS!r} then.",
            file=str(path),
            offset=8,
        )
    return crcs[1:]


def _records(path: Path, tensors: Mapping[str, TensorEntry], crcs: Sequence[int]) -> dict[str, TensorEntry]:
    """Return the tensors with their checksums."""
    found = {}
    for (name, entry), crc in zip(tensors.items(), crcs, strict=True):
        [chunk] = entry.chunks()
        record = Record(path, chunk.offset, chunk.nbytes, crc)
        found[name] = replace(entry, stored=(replace(chunk, record=record),))
    return found


def _entry(path: Path, name: str, value: Any, begin: int) -> TensorEntry:
    try:
        dtype = from_safetensors_code(value["dtype"])
    except ConfigError as error:
        raise UnknownDtypeError(f"Tensor {name!r} of {path.name}: {error.message}", file=str(path)) from error
    start, end = value["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (start, end)):
        raise ValueError(f"tensor {name!r} has offsets that are not numbers")
    try:
        shape = integers(value["shape"])
    except ValueError as error:
        raise ValueError(f"the shape of tensor {name!r} is invalid: {error}") from error
    if (count := numbers_per_element(dtype)) > 1:
        if not shape or shape[-1] % count:
            raise FormatError(
                f"Tensor {name!r} of {path.name} has dtype {value['dtype']} and shape {list(shape)}. mmfsdp reads only "
                f"rows of whole bytes of this dtype: {count} numbers, or several times as many.",
                file=str(path),
            )
        shape = (*shape[:-1], shape[-1] // count)
    if end - start != math.prod(shape) * itemsize(dtype):
        raise ValueError(f"tensor {name!r} of {dtype} and shape {list(shape)} cannot have {end - start} bytes")
    chunk = Chunk(path, begin + start, end - start, (0,) * len(shape), shape)
    return TensorEntry(name, dtype, shape, (chunk,))


_SHARDING_INFO = "DCP_SHARDING_INFO"
"""Key in the header's ``__metadata__`` under which the offsets of the boxes lie, as JSON."""

_RANK_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_MAX_FILES = 1_000_000
_MOST_NAMED = 3  # of what is missing


def read_ranks(source: SourcePath) -> Layout:
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
        layout = read(SourcePath(files[0]))
        return Layout(path, "safetensors", 1, layout.tensors, layout.tree)
    ranks = _check_ranks(path, names)
    tensors: dict[str, list[TensorEntry]] = {}
    for file in files:
        entries, metadata = read_entries(file)
        offsets = box_offsets(file, metadata)
        for name, entry in entries.items():
            tensors.setdefault(name, []).append(_moved(entry, offsets))
    joined = {name: _joined(name, parts) for name, parts in tensors.items()}
    return Layout(path, "safetensors_ranks", ranks, joined, {name: TensorRef(name) for name in joined})


def box_offsets(file: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return where in its tensor each box of a file begins.

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
        raise damaged(f"{_SHARDING_INFO} of {file.name}", error, file) from error
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
    boxes: dict[Bounds, Chunk] = {}
    for chunk in held:
        if (twin := boxes.setdefault(chunk.bounds, chunk)) is not chunk and chunk.numel:
            raise CorruptCheckpointError(
                f"{chunk.file.name} and {twin.file.name} hold the same part of tensor {name!r}. torch writes each "
                "part once: one is a copy of the other, or of another save.",
                file=str(chunk.file),
            )
    return TensorEntry(name, first.dtype, shape, tuple(chunk for chunk in boxes.values() if chunk.numel))


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
        match = PART_FILE.fullmatch(name)
        if match and int(match["count"]) > len(names):
            parts = part_names(match, most=len(names) + _MOST_NAMED)
            missing = [part for part in parts if part not in names][:_MOST_NAMED]
            more = int(match["count"]) - len(names) - len(missing)
            raise IncompleteCheckpointError(
                f"{path.name} holds {name}, one of {int(match['count'])} files, and no index. It lacks "
                f"{name_list(missing)}{f' and {more} more' if more > 0 else ''}. Get the missing files.",
                file=str(path / name),
            )
