"""Writes the ``.metadata`` pickle of a torch DCP directory: its tensors, their boxes, and where each one is stored.

The classes that the pickle names are those of torch/distributed/checkpoint/metadata.py and filesystem.py. A large model
has hundreds of thousands of boxes, so their opcodes are joined directly instead of building and walking objects
(https://docs.python.org/3/library/pickletools.html, docs/adr/0006-mechanisms-removed-and-kept.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mmfsdp.checkpoint.formats.dcp_metadata import Box, Location
from mmfsdp.checkpoint.pickles.pickling import PickleWriter, int_opcodes, name_opcodes, text_opcodes

__all__ = ["WrittenTensor", "dcp_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_NONE, _FALSE = b"N", b"\x89"


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
        names: The nested keys behind each flat name.
        tensors: The tensors by flat name; every other name is that of a pickled object.
        locations: Where each box is stored, by flat name and offsets of the box (``None`` for an object).
    """
    writer = PickleWriter()

    def kind(name: str, module: str = _METADATA) -> bytes:
        return writer.keep(name_opcodes(module, name))

    def keys(*texts: str) -> list[bytes]:
        return [writer.keep(text_opcodes(text)) for text in texts]

    properties = {dtype: _properties(writer, dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    size_kind, index, chunk = kind("Size", "torch"), kind("MetadataIndex"), kind("ChunkStorageMetadata")
    tensor_kind, object_kind = kind("TensorStorageMetadata"), kind("BytesStorageMetadata")
    place_kind = kind("_StorageInfo", "torch.distributed.checkpoint.filesystem")
    of_tensor, of_box = keys("properties", "size", "chunks"), keys("offsets", "sizes")
    of_index, of_place = keys("fqn", "offset", "index"), keys("relative_path", "offset", "length")
    files = dict.fromkeys(place.file for place in locations.values())
    file_texts = dict(zip(files, keys(*files), strict=True))

    def size(numbers: Iterable[int]) -> bytes:
        return _called(size_kind, _tuple(map(int_opcodes, numbers)))

    def described(tensor: WrittenTensor | None) -> bytes:
        if tensor is None:
            return _restored(object_kind, _dict(()))
        boxes = b"".join(_restored(chunk, _dict(zip(of_box, map(size, box), strict=True))) for box in tensor.boxes)
        values = properties[tensor.dtype], size(tensor.shape), b"](" + boxes + b"e"
        return _restored(tensor_kind, _dict(zip(of_tensor, values, strict=True)))

    def stored() -> Iterable[tuple[bytes, bytes]]:
        counts: dict[str, int] = {}
        for (name, offsets), place in locations.items():
            number = counts[name] = counts.get(name, -1) + 1  # boxes are listed in the order of their tensor
            box = (_NONE, _NONE) if offsets is None else (size(offsets), int_opcodes(number))
            where = file_texts[place.file], int_opcodes(place.offset), int_opcodes(place.length)
            yield (
                _restored(index, _dict(zip(of_index, (text_opcodes(name), *box), strict=True))),
                _restored(place_kind, _dict(zip(of_place, where, strict=True))),
            )

    def path(parts: Iterable[str | int]) -> bytes:
        return _tuple(text_opcodes(part) if isinstance(part, str) else int_opcodes(part) for part in parts)

    content = {
        "state_dict_metadata": _dict((text_opcodes(name), described(tensors.get(name))) for name in names),
        "planner_data": _dict((text_opcodes(name), path(parts)) for name, parts in names.items()),
        "storage_data": _dict(stored()),
        "storage_meta": _NONE,
        "version": text_opcodes("1.0.0"),
    }
    state = _dict((text_opcodes(name), value) for name, value in content.items())
    return writer.complete(_restored(kind("Metadata"), state))


def _properties(writer: PickleWriter, dtype: str) -> bytes:
    layout, memory = name_opcodes("torch.serialization", "_get_layout"), name_opcodes(_METADATA, "_MEM_FORMAT_ENCODING")
    parts = (
        name_opcodes("torch", dtype),
        _called(layout, text_opcodes("torch.strided")),
        _FALSE,  # requires_grad
        _called(memory, int_opcodes(0)),
        _FALSE,  # pin_memory
    )
    return writer.keep(_restored(name_opcodes(_METADATA, "TensorProperties"), _tuple(parts)))


def _called(function: bytes, argument: bytes) -> bytes:
    return function + b"(" + argument + b"tR"


def _restored(kind: bytes, state: bytes) -> bytes:
    # kind.__new__(kind), restored from the state
    return kind + b")\x81" + state + b"b"


def _tuple(values: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(values) + b"t"


def _dict(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(part for pair in pairs for part in pair) + b"u"
