"""Writes the ``.metadata`` pickle of a torch DCP directory: which tensors there are, their boxes, and where each lies.

The classes that it names are those of torch/distributed/checkpoint/metadata.py and filesystem.py. The opcodes are put
down one by one (https://docs.python.org/3/library/pickletools.html): a large model has hundreds of thousands of boxes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mmfsdp.checkpoint.formats.dcp_metadata import Box, Location
from mmfsdp.checkpoint.pickles.safe_names import check_is_name

__all__ = ["WrittenTensor", "dcp_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_NONE, _FALSE, _EMPTY_DICT, _EMPTY_LIST, _POP = b"N", b"\x89", b"}", b"]", b"0"
_MARK, _TUPLE, _LIST_OF, _ITEMS, _BUILD, _CALL, _STOP = b"(", b"t", b"e", b"u", b"b", b"R", b"."
_MADE = b")\x81"  # cls.__new__(cls)


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor as the metadata describes it."""

    dtype: str
    """Canonical dtype name."""
    shape: tuple[int, ...]
    """Global shape in elements."""
    boxes: tuple[Box, ...]
    """The boxes that it is stored in."""


def dcp_metadata(
    names: Mapping[str, tuple[str | int, ...]],
    tensors: Mapping[str, WrittenTensor],
    locations: Mapping[tuple[str, tuple[int, ...] | None], Location],
) -> bytes:
    """Return the content of ``.metadata``.

    Args:
        names: Flat name to the nested keys that it was made of.
        tensors: Flat name to tensor; every other name is of a pickled object.
        locations: Flat name and offsets of the box (``None`` for an object) to where it is stored.
    """
    pickle = _Pickle()
    kind, text = pickle.kind, pickle.text
    properties = {dtype: _properties(pickle, dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    fields = [pickle.constant(text(name)) for name in ("properties", "size", "chunks", "offsets", "sizes")]
    in_index = [pickle.constant(text(name)) for name in ("fqn", "offset", "index")]
    in_place = [pickle.constant(text(name)) for name in ("relative_path", "offset", "length")]
    files = {file: pickle.constant(text(file)) for file in dict.fromkeys(place.file for place in locations.values())}
    size_of, chunk, index = (
        kind("torch", "Size"),
        kind(_METADATA, "ChunkStorageMetadata"),
        kind(_METADATA, "MetadataIndex"),
    )
    tensor_kind, object_kind = kind(_METADATA, "TensorStorageMetadata"), kind(_METADATA, "BytesStorageMetadata")
    place_kind = kind("torch.distributed.checkpoint.filesystem", "_StorageInfo")

    def size(numbers: Iterable[int]) -> bytes:
        return size_of + _MARK + _MARK + b"".join(map(_integer, numbers)) + _TUPLE + _TUPLE + _CALL

    def made(cls: bytes, keys: Iterable[bytes], values: Iterable[bytes]) -> bytes:
        pairs = b"".join(part for pair in zip(keys, values, strict=True) for part in pair)
        return cls + _MADE + _EMPTY_DICT + _MARK + pairs + _ITEMS + _BUILD

    def described(tensor: WrittenTensor | None) -> bytes:
        if tensor is None:
            return object_kind + _MADE + _EMPTY_DICT + _BUILD
        boxes = b"".join(made(chunk, fields[3:], map(size, box)) for box in tensor.boxes)
        chunks = _EMPTY_LIST + _MARK + boxes + _LIST_OF
        return made(tensor_kind, fields[:3], (properties[tensor.dtype], size(tensor.shape), chunks))

    def stored() -> Iterable[bytes]:
        counts: dict[str, int] = {}
        for (name, offsets), place in locations.items():
            number = counts[name] = counts.get(name, -1) + 1  # boxes are listed in the order of their tensor
            where = (_NONE, _NONE) if offsets is None else (size(offsets), _integer(number))
            yield made(index, in_index, (text(name), *where))
            yield made(place_kind, in_place, (files[place.file], _integer(place.offset), _integer(place.length)))

    def key(part: str | int) -> bytes:
        return text(part) if isinstance(part, str) else _integer(part)

    content = {
        "state_dict_metadata": _dict(part for name in names for part in (text(name), described(tensors.get(name)))),
        "planner_data": _dict(
            part for name, path in names.items() for part in (text(name), _MARK + b"".join(map(key, path)) + _TUPLE)
        ),
        "storage_data": _dict(stored()),
        "storage_meta": _NONE,
        "version": text("1.0.0"),
    }
    return pickle.complete(made(kind(_METADATA, "Metadata"), map(text, content), content.values()))


class _Pickle:
    """The beginning of a pickle: what is needed often is put into its memo once."""

    def __init__(self) -> None:
        self._begin = bytearray(b"\x80\x02")
        self._count = 0

    def constant(self, opcodes: bytes) -> bytes:
        """Keep a value, and return the opcodes that push it again."""
        number = struct.pack("<I", self._count)
        self._begin += opcodes + b"r" + number + _POP
        self._count += 1
        return b"j" + number

    def kind(self, module: str, name: str) -> bytes:
        """Keep a class or function by name."""
        check_is_name(module, name)
        return self.constant(f"c{module}\n{name}\n".encode())

    @staticmethod
    def text(value: str) -> bytes:
        """Return the opcodes that push a text."""
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data

    def complete(self, opcodes: bytes) -> bytes:
        """Return the whole pickle of a value."""
        return bytes(self._begin) + opcodes + _STOP


def _properties(pickle: _Pickle, dtype: str) -> bytes:
    def called(module: str, name: str, argument: bytes) -> bytes:
        return pickle.kind(module, name) + _MARK + argument + _TUPLE + _CALL

    parts = (
        pickle.kind("torch", dtype),
        called("torch.serialization", "_get_layout", pickle.text("torch.strided")),
        _FALSE,  # requires_grad
        called(_METADATA, "_MEM_FORMAT_ENCODING", _integer(0)),
        _FALSE,  # pin_memory
    )
    return pickle.constant(
        pickle.kind(_METADATA, "TensorProperties") + _MADE + _MARK + b"".join(parts) + _TUPLE + _BUILD
    )


def _dict(parts: Iterable[bytes]) -> bytes:
    return _EMPTY_DICT + _MARK + b"".join(parts) + _ITEMS


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
