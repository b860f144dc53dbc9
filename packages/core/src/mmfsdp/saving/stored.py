"""A tensor on disk, of which a rank reads no more than the box it needs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.basics.dtypes import to_torch
from mmfsdp.collective.steps import Scope, any_of, broadcast_object, gather_to_first, on_all_ranks, scatter_objects
from mmfsdp.runtime.dtensors import Box, box_of, local_part
from mmfsdp.saving.source import Source, Wanted, known_source

__all__ = ["StoredTensor", "check_unchanged", "local_value", "locate", "stored_tensors", "whole_box", "whole_value"]


class StoredTensor:
    """A tensor of a checkpoint that is read when asked for, in any part.

    Args:
        name: Its name in the checkpoint.
        dtype: Canonical dtype name.
        shape: Of the whole, in elements.
        source: Where it is read from.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], source: Source) -> None:
        self.name, self.source = name, source
        self.shape = torch.Size(shape)
        self.dtype: torch.dtype = to_torch(dtype)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Return a box of the tensor, by default all of it, as a new CPU tensor. Not collective.

        Raises:
            CorruptCheckpointError: It is damaged, or a file ends before the tensor does.
        """
        box = box or whole_box(self)
        result = torch.empty(box.sizes, dtype=self.dtype)
        if result.numel():
            size = result.numel() * result.element_size()
            memory = memoryview((ctypes.c_char * size).from_address(result.data_ptr())).cast("B")
            self.source.fill(self.name, box.bounds, memory)
        return result


def stored_tensors(source: Source) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by name."""
    return {name: StoredTensor(name, entry.dtype, entry.shape, source) for name, entry in source.layout.tensors.items()}


def locate(wanted: Iterable[tuple[Any, Box]], scope: Scope) -> None:
    """Let every rank know where what it will read lies, and check what several ranks read parts of. Collective.

    One rank knows where everything is; each is told of what meets its boxes, whatever the number of ranks.

    Args:
        wanted: What this rank will read, and which box; what is not a `StoredTensor` needs nothing.
        scope: Who takes part.

    Raises:
        CheckpointError: It is damaged, or not what was opened; raised on every rank.
    """
    mine: dict[str, list[Wanted]] = {}
    sources: dict[str, Source] = {}
    for value, box in wanted:
        if isinstance(value, StoredTensor) and value.source.is_shared:
            sources[value.source.key] = value.source
            mine.setdefault(value.source.key, []).append((value.name, box.bounds))
    if not any_of(scope, bool(mine)):
        return
    # The same sources in the same order, also where a rank wants nothing of one.
    for key in broadcast_object(scope, [*mine]):
        _ask(key, sources.get(key), mine.get(key, []), scope)


def _ask(key: str, source: Source | None, wanted: list[Wanted], scope: Scope) -> None:
    requests = gather_to_first(scope, wanted)
    answers = on_all_ranks(lambda: known_source(key).find(requests) if requests is not None else None, scope)
    found = scatter_objects(scope, answers)

    def take() -> None:
        if source is not None:
            source.learn(wanted, found)
            source.check(found.checks)

    on_all_ranks(take, scope)


def check_unchanged(values: Iterable[Any]) -> None:
    """Compare what is where tensors were read from with what was opened. Not collective.

    Args:
        values: Those that were read; what is not a `StoredTensor` is not looked at.

    Raises:
        CorruptCheckpointError: It was replaced meanwhile.
    """
    for source in {id(value.source): value.source for value in values if isinstance(value, StoredTensor)}.values():
        source.check_unchanged()


def local_value(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the part of ``value`` that a tensor placed as ``like`` holds on this rank. Not collective.

    Args:
        value: A whole tensor, a DTensor of the same placement, or a `StoredTensor`.
        like: The tensor to be filled.
    """
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, StoredTensor):
        return value.read(box_of(like))
    return local_part(value, like)


def whole_box(value: StoredTensor) -> Box:
    """Return the box that is all of a tensor."""
    return Box((0,) * value.dim(), tuple(value.shape))


def whole_value(value: Any) -> Any:
    """Return ``value`` with a `StoredTensor` read whole. Not collective."""
    return value.read() if isinstance(value, StoredTensor) else value
