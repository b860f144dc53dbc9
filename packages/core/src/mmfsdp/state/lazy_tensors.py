"""Tensors that are not in memory yet: their shape and dtype are known, and each rank reads the box that it needs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import Bounds
from mmfsdp.basics.dtypes import to_torch
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import any_of, broadcast_object, gather_to_first, on_all_ranks, scatter_objects
from mmfsdp.runtime.dtensors import Box, box_of, local_part

__all__ = [
    "LazyTensor",
    "TensorSource",
    "Wanted",
    "check_unchanged",
    "local_value",
    "locate",
    "whole_box",
    "whole_value",
]

Wanted = tuple[str, Bounds]
"""The name of a tensor, and the box of it that a rank will read."""


class TensorSource(Protocol):
    """Where lazy tensors are read from, such as a checkpoint.

    If a source is shared, only the first rank has read where everything lies. Either it has told all ranks; then
    `locate` calls `read_in_part` and `check_own` on every rank before they read. Or it calls `find` on the first rank
    and `learn` on every rank. No method is collective.
    """

    key: str
    """Identifies the source; the same on every rank."""
    is_shared: bool
    """Whether only the first rank has read where things lie."""

    @property
    def is_local(self) -> bool:
        """Whether it is on disk, where a host's page cache keeps what one of its ranks has read for the others."""
        ...

    @property
    def num_records(self) -> int | None:
        """How many numbers `read_in_part` returns, the same on every rank; ``None`` if ranks ask the first one."""
        ...

    def read_in_part(self, wanted: Sequence[Wanted]) -> list[int]:
        """Return -1 for each record that this rank reads only in part, else 0.

        If the first number is below 0 on any rank, ranks ask the first one.
        """
        ...

    def check_own(self, wanted: Sequence[Wanted], flags: Sequence[int], rank: int, count: int) -> None:
        """Prepare to read, and check this rank's share of the records with a flag below 0."""
        ...

    def find(self, requests: Sequence[Sequence[Wanted]]) -> Sequence[Any]:
        """Return one item per rank: what the rank must know to read its request."""
        ...

    def learn(self, wanted: Sequence[Wanted], found: Any) -> None:
        """Take this rank's item of `find`, and make the checks that it assigns to this rank."""
        ...

    def fill(self, name: str, box: Bounds, target: memoryview) -> None:
        """Read a box of a tensor into memory, in row-major order."""
        ...

    def check_unchanged(self) -> None:
        """Raise if the source was replaced after it was opened."""
        ...


class LazyTensor:
    """A tensor that is read when asked for, whole or in part.

    Args:
        name: The tensor's name in its source.
        dtype: Canonical dtype name.
        shape: Shape of the whole tensor, in elements.
        source: Where it is read from.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], source: TensorSource) -> None:
        self.name, self.source = name, source
        self.shape = torch.Size(shape)
        self.dtype: torch.dtype = to_torch(dtype)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Return a box of the tensor, by default all of it, as a new CPU tensor. Not collective.

        Raises:
            CorruptCheckpointError: The data is damaged, or a file ends before the tensor does.
        """
        box = box or whole_box(self)
        result = torch.empty(box.sizes, dtype=self.dtype)
        self.read_into(result, box)
        return result

    def read_into(self, target: torch.Tensor, box: Box) -> None:
        """Read a box into a tensor of its sizes, whatever the dtype, device and strides of that. Not collective.

        Raises:
            CorruptCheckpointError: The data is damaged, or a file ends before the tensor does. The target may hold some
                of it.
        """
        if target.dtype != self.dtype or target.device.type != "cpu" or not target.is_contiguous():
            target.copy_(self.read(box))
        elif target.numel():
            size = target.numel() * target.element_size()
            memory = memoryview((ctypes.c_char * size).from_address(target.data_ptr())).cast("B")
            self.source.fill(self.name, box.bounds, memory)


def locate(wanted: Iterable[tuple[Any, Box | None]], scope: Scope) -> None:
    """Learn where the boxes lie that this rank will read, and check what several ranks read in part. Collective.

    Args:
        wanted: Values that this rank will read, each with the box. Values other than `LazyTensor` are ignored. With
            None for the box the rank reads nothing of it, but takes its share of the checks.
        scope: The ranks that take part.

    Raises:
        CheckpointError: The source is damaged, or not the one that was opened; raised on every rank.
    """
    mine: dict[str, list[Wanted]] = {}
    sources: dict[str, TensorSource] = {}
    for value, box in wanted:
        if isinstance(value, LazyTensor) and value.source.is_shared:
            sources[value.source.key] = value.source
            own = mine.setdefault(value.source.key, [])
            if box is not None:
                own.append((value.name, box.bounds))
    if not any_of(scope, bool(mine)):
        return
    # The first rank's list, so that all ranks take the same sources in the same order.
    for key, count in broadcast_object(scope, [(key, sources[key].num_records) for key in mine]):
        source, boxes = sources.get(key), mine.get(key, [])
        if count is None or not _check_in(source, boxes, count, scope):
            _locate_in(source, boxes, scope)


def _locate_in(source: TensorSource | None, wanted: list[Wanted], scope: Scope) -> None:
    requests = gather_to_first(scope, wanted)
    answers = on_all_ranks(lambda: source.find(requests) if source and requests is not None else None, scope)
    found = scatter_objects(scope, answers)
    on_all_ranks(lambda: source.learn(wanted, found) if source else None, scope)


def _check_in(source: TensorSource | None, wanted: list[Wanted], count: int, scope: Scope) -> bool:
    """Find and check what this rank was told of; return False on every rank if the first one must be asked."""
    flags = source.read_in_part(wanted) if source else [0] * count
    if count:
        flags = scope.channel.lowest(flags)
        if flags[0] < 0:
            return False
    on_all_ranks(lambda: source.check_own(wanted, flags, scope.rank, scope.size) if source else None, scope)
    return True


def check_unchanged(values: Iterable[Any]) -> None:
    """Check that the sources of lazy tensors were not replaced after they were opened. Not collective.

    Args:
        values: What was read. Values other than `LazyTensor` are ignored.

    Raises:
        CorruptCheckpointError: A source was replaced.
    """
    for source in {id(value.source): value.source for value in values if isinstance(value, LazyTensor)}.values():
        source.check_unchanged()


def local_value(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the part of ``value`` that this rank holds of a tensor placed as ``like``. Not collective.

    Args:
        value: A whole tensor, a DTensor of the same placement, or a `LazyTensor`.
        like: The tensor to be filled.
    """
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, LazyTensor):
        return value.read(box_of(like))
    return local_part(value, like)


def whole_box(value: LazyTensor) -> Box:
    """Return the box that covers a tensor."""
    return Box((0,) * value.dim(), tuple(value.shape))


def whole_value(value: Any) -> Any:
    """Return ``value``; a `LazyTensor` is read whole. Not collective."""
    return value.read() if isinstance(value, LazyTensor) else value
