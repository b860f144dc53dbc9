"""Tells where a box lies in its tensor. Equal geometries are one object, so that derived values are made once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from mmfsdp.parity.sketching.buckets import BUCKETS
from mmfsdp.parity.sketching.chunks import WIDTH

__all__ = ["SMALL", "Geometry", "geometry_of", "real"]

SMALL = BUCKETS * WIDTH
"""Elements up to which each element of a tensor has signs of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """A box of a tensor of real numbers."""

    offsets: tuple[int, ...]
    """Where the box begins, in elements, one per dimension."""
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    leading: int
    """How many leading dimensions count as one, so that a box may be every n-th row of a tensor."""
    device: torch.device
    dtype: torch.dtype
    """Dtype of the elements."""
    is_small: bool


def geometry_of(local: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], *, leading: int = 1) -> Geometry:
    """Return the geometry of a box. A complex box counts as its real and imaginary parts.

    Args:
        local: The elements of the box, of any dtype.
        offsets: Where the box begins, in elements, one per dimension.
        shape: The shape of the whole tensor, in elements.
        leading: See `Geometry`.
    """
    value = real(local)
    if local.is_complex():
        offsets, shape = (*offsets, 0), (*shape, 2)
    return _known(offsets, tuple(value.shape), shape, leading, value.device, value.dtype)


def real(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor as real numbers; complex numbers get a further dimension of two."""
    return torch.view_as_real(local) if local.is_complex() else local


@lru_cache(maxsize=1 << 14)
def _known(
    offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], leading: int,
    device: torch.device, dtype: torch.dtype,
) -> Geometry:  # fmt: skip
    is_small = math.prod(shape) <= SMALL or 0 in sizes
    return Geometry(offsets, sizes, shape, leading, device, dtype, is_small)
