"""A tensor on disk, of which a rank reads no more than the box it needs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.checkpoint.copying.gathering import packed_blocks
from mmfsdp.checkpoint.coverage import check_coverage
from mmfsdp.checkpoint.extents import StridedRun, byte_runs
from mmfsdp.checkpoint.layout import Layout, TensorEntry
from mmfsdp.dtypes import to_torch
from mmfsdp.errors import CorruptCheckpointError
from mmfsdp.state.boxes import Box, box_of, local_part

__all__ = ["StoredTensor", "local_value", "stored_tensors", "whole_value"]


class StoredTensor:
    """A tensor of a checkpoint that is read when asked for, in any part.

    Args:
        entry: Where its bytes lie; its chunks must cover it.
    """

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self.shape = torch.Size(entry.shape)
        self.dtype: torch.dtype = to_torch(entry.dtype)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Return a box of the tensor, by default all of it, as a new CPU tensor. Not collective.

        Raises:
            CorruptCheckpointError: A file ends before the tensor does.
        """
        box = box or Box((0,) * self.dim(), tuple(self.shape))
        result = torch.empty(box.sizes, dtype=self.dtype)
        if result.numel() == 0:
            return result
        memory = memoryview((ctypes.c_char * (result.numel() * result.element_size())).from_address(result.data_ptr()))
        target = memory.cast("B")
        for run in byte_runs(self._entry, box.offsets, box.sizes):
            with open(run.file, "rb", buffering=0) as file:
                done = 0
                if isinstance(run, StridedRun):
                    for block in packed_blocks(file.fileno(), run):
                        target[run.target + done : run.target + done + len(block)] = block
                        done += len(block)
                    if done == run.length:
                        continue
                while done < run.length:
                    count = os.preadv(
                        file.fileno(), [target[run.target + done : run.target + run.length]], run.source + done
                    )
                    if count == 0:
                        raise CorruptCheckpointError(
                            f"The file ends inside tensor {self._entry.name!r}.",
                            file=str(run.file),
                            offset=run.source + done,
                        )
                    done += count
        return result


def stored_tensors(layout: Layout) -> Mapping[str, StoredTensor]:
    """Return a layout's tensors by name.

    Raises:
        IncompleteCheckpointError: The chunks of a tensor leave a gap.
    """
    check_coverage(layout)
    return {name: StoredTensor(entry) for name, entry in layout.tensors.items()}


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


def whole_value(value: Any) -> Any:
    """Return ``value`` with a `StoredTensor` read whole."""
    return value.read() if isinstance(value, StoredTensor) else value
