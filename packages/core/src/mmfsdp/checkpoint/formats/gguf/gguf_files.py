"""Plans GGUF files, which llama.cpp loads, and copies the tokenizer's entries from one to another.

The format is version 3, little-endian: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. After a
header lie key-value pairs, then a line per tensor, and from a multiple of 32 bytes on the tensors, each at such a
multiple. There are no checksums.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.eight_bit_blocks import EightBitBlocks
from mmfsdp.checkpoint.formats.common.source import CheckpointContent
from mmfsdp.checkpoint.layout import Piece, PlannedFile
from mmfsdp.errors import CorruptCheckpointError, FormatError

__all__ = [
    "TYPES",
    "array_length",
    "flag",
    "number",
    "numbers",
    "plan_write",
    "read_keys",
    "real",
    "reals",
    "text",
    "texts",
    "type_of",
]

TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}
"""ggml's numbers of the types of tensors that are written."""
_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT = 32
# Numbers of the types of values, and the bytes of types of one size.
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def number(value: int) -> bytes:
    """Return the type and the bytes of a value that is a 32-bit unsigned integer."""
    return struct.pack("<II", _UINT32, value)


def real(value: float) -> bytes:
    """Return the type and the bytes of a value that is a 32-bit float."""
    return struct.pack("<If", _FLOAT32, value)


def text(value: str) -> bytes:
    """Return the type and the bytes of a value that is text."""
    return struct.pack("<I", _STRING) + _string(value)


def flag(value: bool) -> bytes:
    """Return the type and the bytes of a value that is true or false."""
    return struct.pack("<I?", _BOOL, value)


def numbers(values: Sequence[int]) -> bytes:
    """Return the type and the bytes of an array of 32-bit integers."""
    return struct.pack(f"<IIQ{len(values)}i", _ARRAY, _INT32, len(values), *values)


def reals(values: Sequence[float]) -> bytes:
    """Return the type and the bytes of an array of 32-bit floats."""
    return struct.pack(f"<IIQ{len(values)}f", _ARRAY, _FLOAT32, len(values), *values)


def texts(values: Sequence[str]) -> bytes:
    """Return the type and the bytes of an array of texts."""
    return struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + b"".join(map(_string, values))


def type_of(entry: TensorEntry) -> str:
    """Return the name of ggml's type of a tensor: one of `TYPES`."""
    return "Q8_0" if isinstance(entry, EightBitBlocks) else _OF_DTYPE[entry.dtype]


def plan_write(content: CheckpointContent) -> list[PlannedFile]:
    """Plan the file; the tensors are of `TYPES`, and ``content.keys`` are the key-value pairs."""
    named = content.named
    lines, offsets, position = [], [], 0
    for name, entry in named.items():
        shape = entry.parts[0].shape if isinstance(entry, EightBitBlocks) else entry.shape
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        lines.append(_string(name) + sizes + struct.pack("<IQ", TYPES[type_of(entry)], position))
        offsets.append(position)
        position += _aligned(entry.nbytes)
    head = struct.pack("<4sIQQ", _MAGIC, _VERSION, len(named), len(content.keys))
    head += b"".join([*(_string(key) + value for key, value in content.keys.items()), *lines])
    begin = _aligned(len(head))
    pieces = tuple(Piece(entry, begin + offset) for entry, offset in zip(named.values(), offsets, strict=True))
    return [PlannedFile("", begin + position, pieces, lambda _: [(0, head)])]


def read_keys(path: Path, prefix: str) -> dict[str, bytes]:
    """Return the type and the bytes of each value of a GGUF file whose key begins with a prefix, in file order.

    Raises:
        FormatError: It is no GGUF file of version 3, little-endian.
        CorruptCheckpointError: It is damaged.
    """
    found = {}
    with path.open("rb") as file:
        if file.read(8) != struct.pack("<4sI", _MAGIC, _VERSION):
            raise FormatError(f"{path.name} is not a little-endian GGUF file of version 3.", file=str(path))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                [count], position = struct.unpack_from("<Q", data, 16), 24
                for _ in range(count):
                    start, position = position + 8, _end(data, position, _STRING)
                    key = data[start:position].decode()
                    [kind] = struct.unpack_from("<I", data, position)
                    end = _end(data, position + 4, kind)
                    if key.startswith(prefix):
                        found[key] = data[position:end]
                    position = end
            except (struct.error, KeyError, UnicodeError, RecursionError) as error:
                raise CorruptCheckpointError(f"The keys of {path.name} are damaged.", file=str(path)) from error
    return found


def array_length(value: bytes) -> int:
    """Return how many elements a value has that `read_keys` returned; 0 if it is no array."""
    kind, _, count = struct.unpack_from("<IIQ", value) if len(value) >= 16 else (0, 0, 0)
    return count if kind == _ARRAY else 0


def _end(data: mmap.mmap, position: int, kind: int) -> int:
    """Return where a value ends.

    Raises:
        struct.error, KeyError: It does not end in the file, or its type is unknown.
    """
    if kind == _STRING:
        [length] = struct.unpack_from("<Q", data, position)
        end = position + 8 + length
    elif kind == _ARRAY:
        inner, count = struct.unpack_from("<IQ", data, position)
        end = position + 12
        if inner in _SIZES:
            end += _SIZES[inner] * count
        else:
            for _ in range(count):
                end = _end(data, end, inner)
    else:
        end = position + _SIZES[kind]
    if end > len(data):
        raise struct.error("it ends after the file")
    return int(end)


def _string(value: str) -> bytes:
    data = value.encode(errors="replace")
    return struct.pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
