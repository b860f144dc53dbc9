"""The index at the end of each ``.distcp`` file that mmfsdp writes, which torch never reads.

``.metadata`` lists what all files hold: two million items if 2,048 ranks save a thousand tensors. With an index of its
own, each file says what it holds, and the first one also by which rule tensors are spread over the others, so that no
rank needs ``.metadata`` to load. The index is JSON, and what is behind it says how long it is::

    {"save_id": str, "items": [[flat name, offsets of the box or null, first byte, length], ...],
     "ranks": number, "names": [[flat name, keys, null for a value that is not a tensor, or
                                 [dtype, shape, mesh, placements, replica, order]], ...],
     "integer_keys": {flat name: [position among its keys, ...], ...}}

``order`` is left out where the dimensions of the mesh divide from the first to the last. The last three are in the file
of the first rank, and only if a rule holds for each tensor; the last one lists the keys
of dicts that are integers, if there are any.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.boxes import EvenBoxes
from mmfsdp.basics.descriptors import read_at, size_of
from mmfsdp.basics.dtypes import DTYPES
from mmfsdp.checkpoint.damage import damaged
from mmfsdp.checkpoint.formats.dcp.items import Location
from mmfsdp.checkpoint.formats.dcp.names import Keys, integer_keys, mark_integers
from mmfsdp.checkpoint.integrity import crc32

__all__ = ["FILE", "FileIndex", "Item", "Named", "Rules", "index_bytes", "read_index"]

FILE = "__{}_0.distcp"
"""The name of a rank's file."""

_END = struct.Struct("<QL8s")  # length and CRC-32 of the index
_MAGIC = b"mmfsdp-1"
_MOST_RANKS = 1_000_000  # more is damage, or malice

Item = tuple[str, tuple[int, ...] | None]
"""Flat name, and offsets of the box; None for a value that is not a tensor."""


@dataclass(frozen=True, slots=True)
class Named:
    """The value that a flat name stands for."""

    keys: Keys
    """The nested keys that it was made of."""
    dtype: str = ""
    """Canonical dtype name; empty for a value that is not a tensor."""
    boxes: EvenBoxes | None = None
    """Which rank wrote which box; None for a value that is not a tensor, which the first rank wrote."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The content of all files together."""

    ranks: int
    """How many ranks there were."""
    names: Mapping[str, Named]
    """By flat name, in the order of the state dict."""


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The content of one file."""

    save_id: str
    """Identifies the save."""
    items: Mapping[Item, Location]
    """Location of each item."""
    rules: Rules | None
    """The content of all files; None in the files of other ranks, or if it follows no rule."""


def index_bytes(save_id: str, items: Iterable[tuple[Item, int, int]], rules: Rules | None = None) -> bytes:
    """Return what ends a file.

    Args:
        save_id: Identifies the save.
        items: The items with their first byte and length.
        rules: For the file of the first rank.
    """
    content: dict[str, Any] = {
        "save_id": save_id,
        "items": [[name, offsets, begin, length] for (name, offsets), begin, length in items],
    }
    if rules is not None:
        content |= {"ranks": rules.ranks, "names": [[name, *_listed(named)] for name, named in rules.names.items()]}
        integers = {name: found for name, named in rules.names.items() if (found := integer_keys(named.keys))}
        content |= {"integer_keys": integers} if integers else {}
    data = json.dumps(content, separators=(",", ":")).encode()
    return data + _END.pack(len(data), crc32(data), _MAGIC)


def read_index(path: Path, source: int) -> FileIndex | None:
    """Return what a file says of itself; ``None`` if it has no index, as when torch wrote it.

    Args:
        path: The file.
        source: Its descriptor.

    Raises:
        CorruptCheckpointError: The index is damaged.
    """
    end = size_of(source) - _END.size
    tail = read_at(source, _END.size, end) if end > 0 else b""
    if not tail.endswith(_MAGIC):
        return None
    length, crc, _ = _END.unpack(tail)
    begin = max(end - length, 0)
    data = read_at(source, end - begin, begin)
    try:
        if crc32(data) != crc:
            raise ValueError("its CRC-32 does not match")
        return _parsed(json.loads(data), path.name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"The index of {path.name}", str(error), path, begin) from error


def _listed(named: Named) -> tuple[Any, Any]:
    boxes = named.boxes
    if boxes is None:
        return named.keys, None
    order = (boxes.order,) if boxes.order else ()
    return named.keys, (named.dtype, boxes.shape, boxes.mesh, boxes.placements, boxes.replica, *order)


def _parsed(content: Any, file: str) -> FileIndex:
    items: dict[Item, Location] = {}
    for name, offsets, begin, length in content["items"]:
        key = _checked(name, str), None if offsets is None else _sizes(offsets)
        items[key] = Location(file, *_sizes((begin, length)))
    save_id = _checked(content["save_id"], str)
    if "names" not in content:
        return FileIndex(save_id, items, None)
    ranks = _checked(content["ranks"], int)
    if not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"it names {ranks} ranks")
    integers = content.get("integer_keys", {})
    names = {
        _checked(name, str): _named(mark_integers(tuple(keys), integers.get(name, ())), tensor, ranks)
        for name, keys, tensor in content["names"]
    }
    return FileIndex(save_id, items, Rules(ranks, names))


def _named(path: Keys, tensor: Any, ranks: int) -> Named:
    if not path or any(not isinstance(key, str) and (type(key) is not int or key < 0) for key in path):
        raise ValueError(f"the keys {path!r} are malformed")
    if tensor is None:
        return Named(path)
    dtype, shape, mesh, placements, replica, *order = tensor
    boxes = EvenBoxes(_sizes(shape), _sizes(mesh), tuple(placements), replica, *map(_sizes, order))
    if dtype not in DTYPES or math.prod(boxes.mesh) != ranks or not boxes.is_valid:
        raise ValueError(f"the rule {tensor!r} is malformed")
    return Named(path, dtype, boxes)


def _sizes(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if any(type(value) is not int or value < 0 for value in found):
        raise ValueError(f"{values!r} are not sizes")
    return found


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value
