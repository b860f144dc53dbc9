"""Answers operators whose results depend on values that a rehearsal does not have: shapes by assumption. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["answer", "finite", "scalar"]


def finite(operator: str, args: Any) -> bool | None:
    """Return what an operator finds everywhere if all values are finite, as in training that goes well; None if unsure.

    ``torch.isfinite(x)`` reaches operators as ``(x == x) * (x.abs() != inf)``.
    """
    name = operator.removeprefix("aten::")
    if name in ("isnan", "isinf"):
        return False
    if name not in ("eq", "ne"):
        return None
    with_itself = args[0] is args[1]
    if with_itself or (isinstance(args[1], float) and math.isinf(args[1])):
        return (name == "eq") is with_itself
    return None


def scalar(dtype: torch.dtype) -> bool | int | float:
    """Return the assumed value of a tensor of one element: true, or one."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def answer(func: Any, args: Any, kwargs: Any, share: float) -> Any:
    """Return what an operator would, if masks select a share of their elements and all values are distinct and one.

    Args:
        func: The operator, which cannot run without values.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        share: The share, between 0 and 1. At least one element is selected.

    Returns:
        The result; ``NotImplemented`` for an operator about which nothing is assumed.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "_local_scalar_dense":
        return scalar(args[0].dtype)
    if name in ("equal", "allclose"):
        return True
    if name == "nonzero":
        return args[0].new_zeros((_count(args[0].numel(), share), args[0].dim()), dtype=torch.int64)
    if name == "masked_select":
        whole = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return args[0].new_zeros(_count(whole, share))
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return func(args[0], [*_positions(args[1], share)], *args[2:], **kwargs)
    if name in ("_unique2", "_unique", "unique_consecutive"):
        values = args[0].reshape(-1).clone()
        indices = args[0].new_zeros(args[0].shape, dtype=torch.int64)
        return (values, indices, indices.reshape(-1).clone())[: len(func._schema.returns)]
    if name == "unique_dim":
        size = args[0].shape[args[1]]
        indices = args[0].new_zeros(size, dtype=torch.int64)
        return args[0].clone(), indices, indices.clone()
    if name == "repeat_interleave":
        return args[0].new_zeros(kwargs.get("output_size") or args[0].numel(), dtype=torch.int64)
    if name == "bincount":
        minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return args[0].new_zeros(max(minlength, 2), dtype=torch.int64)
    return NotImplemented


def _positions(indices: Any, share: float) -> Iterator[Any]:
    """Yield indices in which positions stand for masks."""
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            count = _count(index.numel(), share)
            yield from (index.new_zeros(count, dtype=torch.int64) for _ in range(index.dim()))
        else:
            yield index


def _count(elements: int, share: float) -> int:
    return min(max(round(elements * share), 1), elements)
