"""Takes optimizers' operators on many tensors apart: into the shards of these, and into single tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmfsdp.rehearsal.fakes.fake import local_of, shard_like

__all__ = ["as_shards", "on_shards", "one_by_one"]

_ELEMENTWISE = {
    "aten::_foreach_abs", "aten::_foreach_add", "aten::_foreach_addcdiv", "aten::_foreach_addcmul",
    "aten::_foreach_div", "aten::_foreach_lerp", "aten::_foreach_mul", "aten::_foreach_neg",
    "aten::_foreach_reciprocal", "aten::_foreach_sign", "aten::_foreach_sqrt", "aten::_foreach_sub",
}  # fmt: skip
"""Operators that return new tensors like the ones in their first list, for floating-point numbers of one dtype."""


def on_shards(func: Any, args: Any) -> list[Any] | None:
    """Return the arguments of a foreach operator as this rank's parts of them.

    DTensor searches for the placements of every tensor of the lists, which takes a quarter of a rehearsal. If the
    tensors that are computed together are alike, the operator only runs on their local parts.

    Args:
        func: The operator, an overload.
        args: Its positional arguments.

    Returns:
        The arguments; None for another operator, or if DTensor has to decide.
    """
    name: str = func._schema.name
    makes_new = name in _ELEMENTWISE
    if not makes_new and not (name.startswith("aten::_foreach_") and name.endswith("_")):
        return None
    if makes_new and any(isinstance(value, DTensor) for value in args):
        return None
    lists = [value for value in args if _is_of_tensors(value)]
    if len({len(value) for value in lists}) != 1:
        return None
    for together in zip(*lists, strict=True):
        first = together[0]
        if not all(isinstance(tensor, DTensor) for tensor in together):
            return None
        if any(_layout(tensor) != _layout(first) for tensor in together[1:]):
            return None
        if any(placement.is_partial() for placement in first.placements):
            return None
        if makes_new and not (first.is_floating_point() and all(other.dtype == first.dtype for other in together)):
            return None
    return [[*map(local_of, value)] if _is_of_tensors(value) else value for value in args]


def as_shards(func: Any, args: Any, result: Any) -> Any:
    """Return what an operator returned for the arguments of `on_shards`, as it would have for those before.

    Args:
        func: The operator, an overload.
        args: The positional arguments before.
        result: Its result.
    """
    if func._schema.name not in _ELEMENTWISE:
        return args[0] if func._schema.returns else None
    return [shard_like(local, like) for local, like in zip(result, args[0], strict=True)]


def one_by_one(func: Any, args: Any, kwargs: Any) -> list[list[Any]] | None:
    """Return the arguments of a foreach operator for one tensor after the other.

    On fake tensors a list takes as long as all its tensors one by one, and most of them are alike.

    Args:
        func: The operator, an overload.
        args: Its positional arguments.
        kwargs: Its other arguments.

    Returns:
        The positional arguments; None for another operator, for single tensors, or if a tensor holds numbers for all.
    """
    if not func._schema.name.startswith("aten::_foreach_"):
        return None
    lengths = {len(value) for value in args if isinstance(value, list | tuple)}
    others = [*args, *kwargs.values()]
    if len(lengths) != 1 or lengths == {1} or any(isinstance(value, torch.Tensor) and value.dim() for value in others):
        return None
    if any(isinstance(value, list | tuple) for value in kwargs.values()):
        return None
    return [
        [[value[index]] if isinstance(value, list | tuple) else value for value in args]
        for index in range(lengths.pop())
    ]


def _is_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _layout(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.placements, tensor.device_mesh
