"""Sketches of tensors: a few numbers that do not depend on sharding, and that add up over the boxes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mmfsdp.parity.figures import BITS, FIRST

__all__ = ["sketch_of", "sketches_of"]

_FLAT = 256  # columns that a tensor of one dimension is folded into
_MOST = 64 << 20  # bytes of signs and places to keep
_kept: dict[tuple[object, ...], torch.Tensor] = {}

_Axis = tuple[tuple[int, int, int], ...]
"""For some dimensions, the first index, the number of indices, and the size of the whole dimension."""


def sketch_of(local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], *, leading: int = 1) -> torch.Tensor:
    """Return the figures of one box of a tensor. Not collective.

    The signs come from a hash of the global index, rows and columns apart, so that the sketches of all boxes of a
    tensor add up to the sketch of the whole tensor, however it is divided.

    Args:
        local: The elements of the box, of any dtype.
        offsets: Where the box begins, in elements, one per dimension.
        shape: The shape of the whole tensor, in elements.
        leading: How many leading dimensions count as one, so that a box may be every n-th row of a tensor.

    Returns:
        A vector of float64 on the device of ``local``, in the order of `mmfsdp.parity.figures.Figures`.
    """
    return sketches_of(local.detach()[None], offsets, shape, leading=leading)[0]


@torch.no_grad()
def sketches_of(
    locals_: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], *, leading: int = 1
) -> torch.Tensor:
    """Return the figures of the same box of several tensors of equal shape, one row each. Not collective.

    Args:
        locals_: The elements, with a dimension in front that counts tensors.
        offsets: As for `sketch_of`.
        shape: As for `sketch_of`.
        leading: As for `sketch_of`.
    """
    value = locals_
    if value.is_complex():
        value = torch.view_as_real(value)
        offsets, shape = [*offsets, 0], [*shape, 2]
    inner = value.shape[1 + leading :]
    sharded_columns = any(have != whole for have, whole in zip(inner, shape[leading:], strict=True))
    wide = value.dtype == torch.float64 or not value.is_floating_point() or sharded_columns
    value = value.to(torch.float64 if wide else torch.float32)
    count = len(value)
    if value.numel() == 0:
        empty = torch.zeros(count, FIRST + 2 * BITS, dtype=torch.float64, device=value.device)
        empty[:, 2], empty[:, 3] = math.inf, -math.inf
        return empty
    flat = value.reshape(count, -1)
    if count == 1:  # faster on a whole tensor than along a dimension
        low, high = (extreme[None] for extreme in torch.aminmax(flat))
    else:
        low, high = flat.amin(1), flat.amax(1)
    norm = torch.linalg.vector_norm(flat, dim=1)
    if value.device.type == "cpu" and bool(norm.isfinite().all()):  # elsewhere, asking would wait for the device
        odd = torch.zeros_like(norm)
    else:
        odd = (flat.shape[1] - flat.isfinite().sum(1)).to(norm)
    rows, columns, matrix = _matrix(value, offsets, shape, leading)
    row_signs, column_signs = _signs(rows, 1, value), _signs(columns, 2, value)
    products = (matrix @ column_signs).mul_(row_signs)
    head = torch.stack([flat.sum(1), norm.square(), low, high, odd], 1).to(torch.float64)
    placed = _places(rows, value, leading) @ products
    return torch.cat([head, products.sum(1, dtype=torch.float64), placed.to(torch.float64)], 1)


def _matrix(
    value: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], leading: int
) -> tuple[_Axis, _Axis, torch.Tensor]:
    """Return the rows, the columns and the elements of boxes as matrices."""
    count = len(value)
    if len(shape) <= 1:
        length, start = (shape[0], offsets[0]) if shape else (1, 0)
        before, after = start % _FLAT, -(start + value[0].numel()) % _FLAT
        folded = torch.nn.functional.pad(value.reshape(count, -1), (before, after)).view(count, -1, _FLAT)
        rows = ((start - before) // _FLAT, folded.shape[1], -(-length // _FLAT))
        return (rows,), ((0, _FLAT, _FLAT),), folded
    axes = tuple(zip(offsets, value.shape[1:], shape, strict=True))
    split = min(range(leading, len(shape)), key=lambda place: math.prod(shape[:place]) + math.prod(shape[place:]))
    matrix = value.reshape(count, math.prod(value.shape[1 : 1 + split]), -1)
    return axes[:split], axes[split:], matrix


def _places(rows: _Axis, like: torch.Tensor, leading: int) -> torch.Tensor:
    """Return for each row of the matrix where it is along the first dimension, from 0 to 1."""

    def make() -> torch.Tensor:
        whole = math.prod(size for _, _, size in rows[:leading])
        places = (_indices(rows[:leading], like.device).to(like.dtype) + 0.5) / whole
        return places.repeat_interleave(math.prod(count for _, count, _ in rows[leading:]))

    return _keep((*rows, "places", leading, like.device, like.dtype), make)


def _signs(axis: _Axis, salt: int, like: torch.Tensor) -> torch.Tensor:
    key = (*axis, "signs", salt, like.device, like.dtype)
    return _keep(key, lambda: _hashed(_indices(axis, like.device), salt, like.dtype))


def _keep(key: tuple[object, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what was made for a key, or make it."""
    if (found := _kept.get(key)) is None:
        if sum(kept.nbytes for kept in _kept.values()) > _MOST:
            _kept.clear()
        found = _kept[key] = make()
    return found


def _indices(axis: _Axis, device: torch.device) -> torch.Tensor:
    """Return the positions of a box's rows or columns among those of the whole tensor."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for start, count, whole in axis:
        found = (found[:, None] * whole + torch.arange(start, start + count, device=device)).reshape(-1)
    return found


def _hashed(indices: torch.Tensor, salt: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the signs of positions, one row each.

    The mixing function is "lowbias32", https://nullprogram.com/blog/2018/07/31/. Products overflow int64, which leaves
    the 32 bits that are used.
    """
    mask = 0xFFFFFFFF
    mixed = (indices ^ ((indices >> 32) * 0x9E3779B1) ^ (salt * 0x85EBCA6B)) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    bits = (mixed[:, None] >> torch.arange(BITS, device=indices.device)) & 1
    return (2 * bits - 1).to(dtype)
