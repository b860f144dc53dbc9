"""Sums the chunks of a tensor in buckets, each with a sign, as hashes of their numbers tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from mmfsdp.parity.sketching.chunks import WIDTH, Axis, Chunks

__all__ = ["BLOCK", "BUCKETS", "POSITIONS", "Bags", "bags_of", "indices", "keep", "rows_of", "signs_of", "sums"]

BUCKETS = 32
"""Buckets in each of two sets."""
POSITIONS = 16
"""Parts of a tensor that have buckets of their own in the second set."""
_SIGNS = 16
"""Random signs of each element of a bucket."""
BLOCK = 2048
"""Chunks that are summed in single precision, and that a processor's cache holds."""
_SUM = 0  # the mode of `torch.embedding_bag`
_MOST = 64 << 20  # bytes to keep
_Kept = TypeVar("_Kept")
_kept: dict[object, tuple[object, int]] = {}


@dataclass(frozen=True, slots=True)
class Bags:
    """The buckets of some chunks; each block has its own."""

    start: int
    stop: int
    indices: torch.Tensor
    """Chunks, bucket by bucket."""
    offsets: torch.Tensor
    """Where each bucket begins in ``indices``."""
    signs: torch.Tensor
    blocks: int


def rows_of(value: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Return the elements of a box as one row per chunk."""
    if chunks.filled:
        whole = value.new_zeros((*value.shape[: chunks.inner], *(size for _, size in chunks.filled)))
        held = whole
        for dim, (start, _) in enumerate(chunks.filled, start=chunks.inner):
            held = held.narrow(dim, start, value.shape[dim])
        held.copy_(value)
        value = whole
    if any(chunks.pad):
        value = F.pad(value.reshape(*value.shape[: chunks.inner], -1), chunks.pad)
    return value.reshape(-1, chunks.width).contiguous()


def bags_of(chunks: Chunks, device: torch.device, dtype: torch.dtype) -> tuple[Sequence[Bags], int]:
    """Return the buckets of a box's chunks, and how many bytes they take.

    Args:
        chunks: The chunks.
        device: Of the elements.
        dtype: Of the signs.
    """
    numbers = indices(chunks.axes, device)
    whole = math.prod(size for _, _, size in chunks.axes)
    each = BLOCK if device.type == "cpu" else len(numbers)  # elsewhere, few calls count more than caches
    made = [_bags(start, part, whole, dtype) for start, part in _parts(numbers, each)]
    return made, sum(bags.indices.nbytes + bags.offsets.nbytes + bags.signs.nbytes for bags in made)


def sums(rows: torch.Tensor, bags: Bags) -> torch.Tensor:
    """Return the sums of chunks in the buckets of both sets.

    Args:
        rows: The chunks from ``bags.start`` to ``bags.stop``, in the dtype of the signs.
        bags: Their buckets.
    """
    # As torch.nn.functional.embedding_bag, without its checks, which take as long for a small tensor.
    found = torch.embedding_bag(rows, bags.indices, bags.offsets, mode=_SUM, per_sample_weights=bags.signs)[0]
    return found if bags.blocks == 1 else found.view(bags.blocks, 2 * BUCKETS, -1).sum(0, dtype=torch.float64)


def signs_of(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return 16 signs for each of `WIDTH` elements of the buckets of both sets."""

    def make() -> tuple[torch.Tensor, int]:
        mixed = _mixed(torch.arange(2 * BUCKETS * WIDTH, device=device), 1)
        signs = torch.stack([_sign(mixed, bit) for bit in range(_SIGNS)], -1).to(dtype)
        return (made := signs.view(2 * BUCKETS, WIDTH, _SIGNS)), made.nbytes

    return keep(("signs", device, dtype), make)


def indices(axes: Sequence[Axis], device: torch.device) -> torch.Tensor:
    """Return the indices of a box's chunks, or elements, in the whole tensor."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for start, count, whole in axes:
        found = (found[:, None] * whole + torch.arange(start, start + count, device=device)).reshape(-1)
    return found


def _parts(numbers: torch.Tensor, each: int) -> list[tuple[int, torch.Tensor]]:
    return [(start, numbers[start : start + each]) for start in range(0, len(numbers), each)]


def _bags(start: int, numbers: torch.Tensor, whole: int, dtype: torch.dtype) -> Bags:
    count, device = len(numbers), numbers.device
    mixed, elements = _mixed(numbers, 2), torch.arange(count, device=device)
    each = BUCKETS // POSITIONS
    second = BUCKETS + numbers * POSITIONS // whole * each + (mixed >> 10) % each
    buckets = torch.cat([mixed % BUCKETS, second])
    keys = (elements // BLOCK * (2 * BUCKETS)).repeat(2) + buckets
    order = torch.argsort(keys, stable=True)
    blocks = -(-count // BLOCK)
    first = torch.searchsorted(keys[order], torch.arange(blocks * 2 * BUCKETS, device=device))
    signs = torch.cat([_sign(mixed, 8), _sign(mixed, 9)]).to(dtype)
    return Bags(start, start + count, elements.repeat(2)[order].int(), first.int(), signs[order], blocks)


def _mixed(numbers: torch.Tensor, salt: int) -> torch.Tensor:
    """Return a hash of 32 bits of each number.

    The mixing function is "lowbias32", https://nullprogram.com/blog/2018/07/31/. Products overflow int64, which leaves
    the 32 bits that are used.
    """
    mask = 0xFFFFFFFF
    mixed = (numbers ^ ((numbers >> 32) * 0x9E3779B1) ^ (salt * 0x85EBCA6B)) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    return mixed


def _sign(mixed: torch.Tensor, bit: int) -> torch.Tensor:
    return 2 * (mixed >> bit & 1) - 1


def keep(key: object, make: Callable[[], tuple[_Kept, int]]) -> _Kept:
    """Return what was made for a key, or make it.

    Args:
        key: What identifies it.
        make: Returns it and its size in bytes. All that is kept is dropped when it takes more than 64 MB.
    """
    if (found := _kept.get(key)) is None:
        if sum(size for _, size in _kept.values()) > _MOST:
            _kept.clear()
        found = _kept[key] = make()
    return found[0]  # type: ignore[return-value]
