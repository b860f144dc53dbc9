"""Separates what ``torch.save`` writes around the data of tensors from that data, which can then be written apart.

``torch.save`` holds the interpreter's lock while it takes the checksums of the data, so training would wait for a save
in the background.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mmfsdp.checkpoint.formats.torch_files.zip_archive import CENTRAL, CENTRAL_CRC, DESCRIPTOR_CRC, END, END64, LOCATOR

__all__ = ["Fill", "Skeleton", "bytes_of", "skeleton_of", "skeleton_of_tensor", "stored_bytes"]

_DATA = re.compile(rb"/data/\d+$")

Fill = Callable[[int], int]
"""Writes the data of the storage with this number, and returns its CRC-32."""


@dataclass(frozen=True)
class Skeleton:
    """An archive of ``torch.save`` without the data of its tensors."""

    parts: tuple[bytes | int, ...]
    """From the first byte to the last: bytes, and how many bytes of data lie between them."""

    @property
    def size(self) -> int:
        """Length of the archive in bytes."""
        return sum(part if isinstance(part, int) else len(part) for part in self.parts)

    def write(self, write: Callable[[bytes | bytearray], Any], fill: Fill) -> None:
        """Write the archive from its first byte to its last.

        Args:
            write: Writes bytes.
            fill: Called for each storage, in their order.
        """
        crcs: list[int] = []
        for place, part in enumerate(self.parts):
            if isinstance(part, int):
                crcs.append(fill(len(crcs)))
                continue
            data = bytearray(part)
            if crcs:  # the descriptor behind the data
                struct.pack_into("<L", data, DESCRIPTOR_CRC, crcs[-1])
            if place == len(self.parts) - 1:
                _complete(data, crcs)
            write(data)


def skeleton_of(content: Any) -> tuple[Skeleton, list[torch.UntypedStorage]] | None:
    """Return the archive of some content, and the storages whose data it lacks, in their order. Not collective.

    Args:
        content: What to save. Its tensors must not change until their data is written.

    Returns:
        ``None`` if the content holds tensors that torch can only save with their data.
    """
    recorder, storages = _Recorder(), {}

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.layout == torch.strided:
                storage = obj.untyped_storage()
                storages[id(storage)] = storage  # a second view of a storage leaves its place as it is
            return NotImplemented

    module: Any = SimpleNamespace(**{**vars(pickle), "Pickler": Pickler})
    try:
        with torch.serialization.skip_data():
            torch.save(content, recorder, pickle_module=module)  # type: ignore[arg-type]
    except RuntimeError as error:
        if "skip_data" in str(error):
            return None
        raise
    given = [storage for storage in storages.values() if storage.nbytes()]
    if [storage.nbytes() for storage in given] != [part for part in recorder.parts if isinstance(part, int)]:
        return None
    return Skeleton(tuple(recorder.parts)), given


@lru_cache(maxsize=4096)
def skeleton_of_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Skeleton:
    """Return the archive of a contiguous tensor alone. A model has few shapes, so most are made once."""
    found = skeleton_of(torch.empty(shape, dtype=dtype))
    assert found is not None
    return found[0]


def stored_bytes(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a storage; of a copy in CPU memory if it is on a device."""
    return bytes_of(torch.empty(0, dtype=torch.uint8).set_(storage.cpu()))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor.

    After ``tensor.numpy()`` its storage could not be resized any more, as FSDP does with that of whole parameters.
    """
    return np.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).data


def _complete(tail: bytearray, crcs: list[int]) -> None:
    """Put the checksums into the directory of an archive, which is the end of its last part."""
    at = tail.rindex(b"PK\x05\x06")
    size = END.unpack_from(tail, at)[5]
    if tail[at - LOCATOR.size :].startswith(b"PK\x06\x07"):
        at -= LOCATOR.size + END64.size
        size = END64.unpack_from(tail, at)[8]
    position, left = at - size, iter(crcs)
    while position < at:
        fields = CENTRAL.unpack_from(tail, position)
        name = position + CENTRAL.size
        end = name + fields[10]
        if fields[9] and _DATA.search(tail[name:end]):  # storages without data have no place of their own
            struct.pack_into("<L", tail, position + CENTRAL_CRC, next(left))
        position = end + fields[11] + fields[12]
    assert next(left, None) is None, "the directory lacks a storage"


class _Recorder:
    """A file that keeps what is written, and how many bytes were skipped."""

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []

    def write(self, data: Any) -> int:
        """Keep bytes."""
        before = self.parts.pop() if self.parts and isinstance(self.parts[-1], bytes) else b""
        assert isinstance(before, bytes)
        self.parts.append(before + data)
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        """Skip bytes."""
        assert whence == 1, "torch skips data forwards"
        self.parts.append(offset)

    def flush(self) -> None:
        """Do nothing."""
