"""Expanded views repeat what is stored: reads each element once where it does not matter how often it is there."""

from __future__ import annotations

import math
from dataclasses import replace

from mmfsdp.basics.dtypes import itemsize
from mmfsdp.checkpoint.layout import TensorEntry

__all__ = ["without_repeats"]


def without_repeats(*entries: TensorEntry) -> tuple[list[TensorEntry], int]:
    """Return tensors of one shape without the repetitions that they have in common, and how often each element occurs.

    A view made by ``expand`` can have more elements than any disk, of which a few are stored.

    Args:
        entries: The tensors; their chunks must cover them (see ``check_coverage``).
    """
    shape = entries[0].shape
    dims = [dim for dim, size in enumerate(shape) if size > 1 and all(_repeats(entry, dim) for entry in entries)]
    if not dims:
        return list(entries), 1
    sizes = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    return [_resized(entry, sizes) for entry in entries], math.prod(shape[dim] for dim in dims)


def _repeats(entry: TensorEntry, dim: int) -> bool:
    chunks = entry.chunks()
    return len(chunks) == 1 and chunks[0].strides is not None and chunks[0].strides[dim] == 0


def _resized(entry: TensorEntry, sizes: tuple[int, ...]) -> TensorEntry:
    chunk = replace(entry.chunks()[0], box_sizes=sizes, nbytes=math.prod(sizes) * itemsize(entry.dtype))
    return replace(entry, shape=sizes, stored=(chunk,))
