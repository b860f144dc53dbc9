"""The memory of a process as files that a layout's chunks lie in, so that live tensors are written as stored ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np
import torch

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.descriptors import RemoteLike, VirtualFile, publish
from mmfsdp.basics.dtypes import canonical_dtype
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.entries import TensorEntry

__all__ = ["LiveTensor", "Memory", "bytes_of", "copy_into", "entry_in_memory", "is_plain", "live_entry"]


class Memory(RemoteLike):
    """The packed elements of a tensor in this process's memory; from a device they are copied while they are read.

    Args:
        tensor: The tensor. It must not change until it is written.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.name = "the memory of this rank"

    def view(self) -> memoryview:
        """Return the elements, in row-major order."""
        return bytes_of(self._tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())

    def descriptor(self, ahead: object = None) -> int:
        """See `RemoteLike`."""
        return publish(_OpenMemory(self.view()))

    def is_offered(self) -> bool:
        """See `RemoteLike`."""
        return True

    def identity(self) -> str:
        """See `RemoteLike`."""
        return self.name

    def read_ahead(self, extents: Iterable[tuple[object, int, int]]) -> object:
        """See `RemoteLike`."""
        return None


class _OpenMemory(VirtualFile):
    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def size(self) -> int:
        return len(self._view)

    def read_into(self, view: memoryview, at: int) -> int:
        data = self._view[at : at + len(view)]
        copy_into(view[: len(data)], data)
        return len(data)

    def prefetch(self, extents: Iterable[tuple[int, int]]) -> None:
        return None

    def expect(self, extents: Iterable[tuple[int, int]]) -> None:
        return None

    def close(self) -> None:
        self._view = memoryview(b"")


@dataclass(frozen=True)
class LiveTensor:
    """Stands for the file of a tensor that ranks hold together, its elements packed in row-major order."""

    name: str
    """Its name on every rank."""


def live_entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    """Return a tensor that ranks hold together; formats plan the offsets of its bytes, and it can be sent to ranks."""
    shape = tuple(tensor.shape)
    chunk = Chunk(cast(Path, LiveTensor(name)), 0, tensor.numel() * tensor.element_size(), (0,) * len(shape), shape)
    return TensorEntry(name, canonical_dtype(tensor.dtype), shape, (chunk,))


def entry_in_memory(name: str, tensor: torch.Tensor, shape: Iterable[int], box: Bounds) -> TensorEntry:
    """Return a tensor that this process holds a box of.

    Args:
        name: Its name.
        tensor: What this process holds.
        shape: Shape of the whole tensor, in elements.
        box: The box, of the shape of the tensor that is held.
    """
    nbytes = tensor.numel() * tensor.element_size()
    chunk = Chunk(cast(Path, Memory(tensor)), 0, nbytes, *box)
    return TensorEntry(name, canonical_dtype(tensor.dtype), tuple(shape), (chunk,))


def is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    """Tell whether a value is a tensor whose elements are its bytes, and not of a class that holds other tensors."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor.

    After ``tensor.numpy()`` its storage could no longer be resized, as FSDP resizes the storage of whole parameters.
    """
    return np.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).data


def copy_into(room: memoryview, data: memoryview) -> None:
    """Copy bytes without holding the interpreter's lock, which a slice of a memoryview would do."""
    np.copyto(np.frombuffer(room, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))
