"""Finds gradients that are still to be reduced, and fills in zeros where this rank has none.

Only this module and `iterations` read gradients that torch may keep in a form of its own: until 2.15 torch keeps
accumulated gradients beside ``.grad``, in their reduce dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mmfsdp.basics.torch_releases import ACCUMULATES_IN_GRAD, torch_has
from mmfsdp.runtime.torch_fsdp2.param_groups import Group

__all__ = ["fill_missing", "gradients_of", "has_gradient"]


def has_gradient(group: Group) -> bool:
    """Return whether a parameter of a group has a gradient that is still to be reduced."""
    kept_apart = not torch_has(ACCUMULATES_IN_GRAD)
    return any(_has_whole(param, kept_apart) for param in group.fsdp_params)


def gradients_of(group: Group) -> Iterator[torch.Tensor]:
    """Yield a group's gradients: unsharded ones of gathered parameters, and reduced ones of shards."""
    for param in group.fsdp_params:
        if hasattr(param, "_unsharded_param"):
            for grad in (param.unsharded_param.grad, getattr(param, "unsharded_accumulated_grad", None)):
                if grad is not None:
                    yield grad
        if param.sharded_param.grad is not None:
            yield param.sharded_param.grad


def fill_missing(group: Group) -> list[int]:
    """Give zero gradients to trained parameters that have none on this rank, right before gradients are reduced.

    torch reduces the gradients that this rank has: if ranks differ, it adds up gradients of different parameters. Its
    own ``set_reduce_scatter_unused_params`` (2.13) also fills in zeros, but does not report for which parameters, and
    until 2.15 it fails if the other gradients were accumulated in another dtype.

    Returns:
        The indices of these parameters in the group.
    """
    kept_apart = not torch_has(ACCUMULATES_IN_GRAD)
    missing = [
        place
        for place, param in enumerate(group.fsdp_params)
        if not _has_whole(param, kept_apart) and param.unsharded_param.requires_grad
    ]
    if missing:
        _put_zeros(group.fsdp_params, missing, kept_apart)
    return missing


def _has_whole(param: Any, kept_apart: bool) -> bool:
    unsharded = getattr(param, "_unsharded_param", None)
    if unsharded is None:
        return False
    return unsharded.grad is not None or (kept_apart and param.unsharded_accumulated_grad is not None)


def _put_zeros(params: list[Any], missing: list[int], kept_apart: bool) -> None:
    """Put zeros in the dtype that the group's other gradients have."""
    is_accumulating = kept_apart and any(param.unsharded_accumulated_grad is not None for param in params)
    if is_accumulating:  # in their reduce dtype: convert all to that dtype
        for param in params:
            if param.unsharded_accumulated_grad is None:
                param.to_accumulated_grad_if_needed()
    for place in missing:
        unsharded = params[place].unsharded_param
        if is_accumulating:
            zeros = torch.zeros_like(unsharded, dtype=params[place].reduce_dtype)
            params[place].unsharded_accumulated_grad = zeros
        else:
            unsharded.grad = torch.zeros_like(unsharded, dtype=getattr(unsharded, "grad_dtype", None))
