"""The layout of a checkpoint, whatever its format: its nested content, its tensors, and files that will hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmfsdp.basics.dtypes import canonical_dtype, itemsize
from mmfsdp.checkpoint.chunks import Chunk
from mmfsdp.checkpoint.entries import TensorEntry

if TYPE_CHECKING:
    import torch.nn as nn

__all__ = ["Layout", "Piece", "PlannedFile", "TensorRef", "layout_of_model"]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Marks the position of a tensor in a checkpoint's tree."""

    name: str
    """The name of the ``TensorEntry``."""
    parameter: bool | None = None
    """``requires_grad`` if it was stored as an ``nn.Parameter``; ``None`` for a plain tensor."""


@dataclass(frozen=True)
class Layout:
    """A checkpoint as read: its nested content, and where every tensor is on disk.

    Reading a layout touches metadata only; no tensor data is read. A layout may keep files open while it is in use.
    """

    path: Path
    """The file or directory that was opened."""
    format: str
    """Name of the format, as `known_formats` lists it."""
    world_size: int
    """Number of ranks that wrote it; 1 for a single file."""
    tensors: Mapping[str, TensorEntry]
    """Name to tensor, in the order of the tree."""
    tree: Any = field(repr=False)
    """The nested content with each tensor replaced by a ``TensorRef``. Treat it as read-only."""
    origins: tuple[Layout, ...] = field(default=(), repr=False)
    """The checkpoints that it is computed from; none if it was read."""
    weights_beside: Callable[[], Sequence[str]] = field(default=tuple, repr=False, compare=False)
    """Finds checkpoints beside one of an optimizer, for an error that says where the weights may be."""
    notes: tuple[str, ...] = field(default=(), repr=False)
    """Notes on how it was read, such as copies of tensors that an index ignores."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together; tied tensors count once per name."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def is_flat(self) -> bool:
        """Whether the content is a bare state dict: names to tensors, without a level of keys above."""
        return (
            isinstance(self.tree, dict)
            and any(isinstance(value, TensorRef) for value in self.tree.values())
            and not any(isinstance(value, dict) for value in self.tree.values())
        )

    @property
    def top_level(self) -> list[str]:
        """The top-level keys, as strings; empty if the content is not a mapping."""
        return [str(key) for key in self.tree] if isinstance(self.tree, dict) else []

    def tensors_below(self, key: str) -> dict[str, TensorEntry]:
        """Return the tensors under a top-level key by their name relative to it.

        Args:
            key: A top-level key such as ``'state_dict'``. A key without tensors gives an empty result.
        """
        prefix = f"{key}/"
        return {name.removeprefix(prefix): entry for name, entry in self.tensors.items() if name.startswith(prefix)}

    def content(self) -> dict[str, dict[str, Any]]:
        """Return what lies under each top-level key, as plain values; empty for a bare state dict.

        ``{'num_tensors': 12, 'bytes': 4096}`` where there are tensors, ``{'num_values': 3, 'names': [...]}`` for a dict
        (the first eight names), ``{'num_values': 3}`` for a list, ``{'value': 7}`` for anything else. Tensors without a
        key of their own share an empty key.
        """
        if self.is_flat or not isinstance(self.tree, dict):
            return {}
        refs = [value for value in self.tree.values() if isinstance(value, TensorRef)]
        lines = {"": {"num_tensors": len(refs), "bytes": sum(self.tensors[ref.name].nbytes for ref in refs)}}
        parts = {key: value for key, value in self.tree.items() if not isinstance(value, TensorRef)}
        return (lines if refs else {}) | {str(key): self._summary(str(key), value) for key, value in parts.items()}

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON, with every tensor."""
        tensors = [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "num_chunks": entry.num_chunks,
                "bytes": entry.nbytes,
            }
            for entry in self.tensors.values()
        ]
        return {
            "path": str(self.path),
            "format": self.format,
            "world_size": self.world_size,
            "num_tensors": len(tensors),
            "bytes": self.nbytes,
            "content": self.content(),
            "tensors": tensors,
            "notes": list(self.notes),
        }

    def _summary(self, key: str, value: Any) -> dict[str, Any]:
        if below := self.tensors_below(key):
            return {"num_tensors": len(below), "bytes": sum(entry.nbytes for entry in below.values())}
        if isinstance(value, dict):
            return {"num_values": len(value), "names": [str(name) for name in [*value][:8]]}
        if isinstance(value, list | tuple | set | frozenset):
            return {"num_values": len(value)}
        if value is None or isinstance(value, bool | int | float):
            return {"value": value}
        text = value if isinstance(value, str) else repr(value)
        return {"value": text if len(text) <= 80 else f"{text[:77]}..."}

    def files(self) -> Iterator[Path]:
        """Yield each file that holds tensor data, once, in order of first use."""
        seen = dict.fromkeys(chunk.file for entry in self.tensors.values() for chunk in entry.chunks())
        yield from seen


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or a box of one, at its offset in a file that will be written."""

    entry: TensorEntry
    """The tensor; it is written packed in row-major order."""
    at: int
    """Where its first element goes, in bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that will be written."""

    name: str
    """Its path within the target; empty where the target is this one file."""
    size: int
    """Its length in bytes."""
    pieces: tuple[Piece, ...]
    """The tensor data, in file order."""
    blocks: Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]
    """Given the CRC-32 of each piece, returns all other bytes with their offsets, in file order. Bytes in neither are
    zero."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(piece.entry.nbytes for piece in self.pieces)


_NOWHERE = Path("(the model)")


def layout_of_model(model: nn.Module) -> Layout:
    """Return the parameters of a model as a layout to give as ``reference`` to `open_layout`. Not collective.

    It has no data: the offset of a chunk numbers the parameter, with the same number for tied names; its strides are
    those in memory.

    Args:
        model: Not sharded, on any device; ``meta`` is enough.

    Example:
        >>> with parameters_on_meta():
        ...     model = MyModel()
        >>> layout = open_layout("work_dirs/run/epoch_3.pth", reference=layout_of_model(model))
    """
    numbers: dict[int, int] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        number = numbers.setdefault(id(param), len(numbers))
        dtype, shape = canonical_dtype(param.dtype), tuple(param.shape)
        strides = None if param.is_contiguous() else tuple(param.stride())
        whole = Chunk(_NOWHERE, number, param.numel() * itemsize(dtype), (0,) * len(shape), shape, strides)
        tensors[name] = TensorEntry(name, dtype, shape, (whole,))
    return Layout(_NOWHERE, "model", 1, tensors, {name: TensorRef(name) for name in tensors})
