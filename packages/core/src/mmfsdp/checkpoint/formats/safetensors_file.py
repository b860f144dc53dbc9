"""Reads the header of a safetensors file into a layout, and writes one as a stream, without torch or safetensors.

Format: eight bytes of header length (little endian), a JSON header, then the data without holes:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.copying import Copier, Progress
from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry, TensorRef
from mmfsdp.dtypes import from_safetensors_code, itemsize, safetensors_code
from mmfsdp.errors import ConfigError, CorruptCheckpointError, FormatError

__all__ = ["looks_like_safetensors", "read_entries", "read_safetensors", "write_safetensors"]

_HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference implementation


def looks_like_safetensors(head: bytes) -> bool:
    """Tell from its first nine bytes whether a file may be a safetensors file."""
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= struct.unpack("<Q", head[:8])[0] <= _HEADER_LIMIT


def read_safetensors(path: Path) -> Layout:
    """Read the layout of a safetensors file.

    Raises:
        FormatError: A dtype is unknown here.
        CorruptCheckpointError: The header is damaged, or the file shorter than it says.
    """
    tensors = read_entries(path)[0]
    return Layout(path, "safetensors", 1, tensors, {name: TensorRef(name) for name in tensors})


def read_entries(path: Path, begin: int = 0, end: int | None = None) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and what its ``__metadata__`` says.

    Args:
        path: The file.
        begin: Where the format begins, in bytes, if it is only part of the file.
        end: Where it ends.

    Raises:
        FormatError: A dtype is unknown here.
        CorruptCheckpointError: The header is damaged, tensors overlap, or the file is shorter than it says.
    """
    size = path.stat().st_size if end is None else end
    with path.open("rb") as file:
        file.seek(begin)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, size - begin - 8):
            raise CorruptCheckpointError(
                f"The header of {path.name} is truncated or damaged.", file=str(path), offset=begin
            )
        raw = file.read(length)
    data = begin + 8 + length
    try:
        header = json.loads(raw)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ does not map strings to strings")
        tensors = {name: _entry(path, name, value, data) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"The header of {path.name} is damaged: {type(error).__name__}: {error}.", file=str(path), offset=begin + 8
        ) from error
    position = data
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].chunks[0].offset, item[1].nbytes)):
        if entry.chunks[0].offset != position:  # the format has neither holes nor overlaps
            raise CorruptCheckpointError(
                f"Tensor {name!r} of {path.name} begins at byte {entry.chunks[0].offset} (expected {position}, where "
                "the one before it ends).",
                file=str(path),
                offset=entry.chunks[0].offset,
            )
        position += entry.nbytes
    if position != size:
        raise CorruptCheckpointError(
            f"{path.name} has {size} bytes (expected {position}): it is "
            f"{'truncated' if size < position else 'too long'}.",
            file=str(path),
        )
    return tensors, metadata


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> int:
    """Write one safetensors file, header first, then the data in constant memory.

    A file of this format cannot say that two names share memory, and safetensors' own ``save_file`` refuses tied
    weights. Here each name gets a copy of its own, which every reader accepts.

    Args:
        path: The file to create; it must not exist.
        tensors: Name in the file to tensor.
        verify: Check the stored CRC-32 of every source record.
        progress: Called with the bytes copied so far and their total.

    Returns:
        Bytes of tensor data written.

    Raises:
        ConfigError: The format cannot hold a dtype or a name.
        CorruptCheckpointError: Source data does not match its checksum.
    """
    # Large items first, as the reference writer does: then every tensor is aligned to its item.
    order = sorted(tensors, key=lambda name: (-itemsize(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name in order:
        entry = tensors[name]
        if name == "__metadata__":
            raise ConfigError("A safetensors file cannot hold a tensor named '__metadata__'. Rename it.")
        end = position + entry.nbytes
        header[name] = {
            "dtype": safetensors_code(entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        offsets[name] = position
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise ConfigError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes; safetensors allows {_HEADER_LIMIT}. Write "
            "a .pth file instead."
        )
    begin = 8 + len(text)
    with path.open("xb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        os.ftruncate(file.fileno(), begin + position)
        with Copier(file.fileno(), total=position, verify=verify, progress=progress) as copier:
            for name in order:
                copier.copy_tensor(tensors[name], begin + offsets[name], checksum=False)
    return position


def _entry(path: Path, name: str, value: Any, begin: int) -> TensorEntry:
    try:
        dtype = from_safetensors_code(value["dtype"])
    except ConfigError as error:
        raise FormatError(f"Tensor {name!r} of {path.name}: {error.message}", file=str(path)) from error
    shape = tuple(value["shape"])
    start, end = value["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"tensor {name!r} has a shape or offsets that are not numbers")
    if end - start != math.prod(shape) * itemsize(dtype):
        raise ValueError(f"tensor {name!r} of {dtype} and shape {list(shape)} cannot have {end - start} bytes")
    chunk = Chunk(path, begin + start, end - start, (0,) * len(shape), shape)
    return TensorEntry(name, dtype, shape, (chunk,))
