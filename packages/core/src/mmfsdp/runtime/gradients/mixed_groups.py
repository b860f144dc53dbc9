"""Lets an optimizer step param groups whose parameters one kernel cannot take together: shards and whole parameters.

Optimizers of torch compute many tensors in one call (``foreach``, ``fused``), but not DTensors and plain tensors, nor
DTensors of several meshes. For the time of a step such a param group is divided into one for each kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["divide_groups", "is_mixed", "join_groups"]

_KEPT = "_mmfsdp_param_groups"
"""The attribute of an optimizer that holds its param groups while they are divided."""


def is_mixed(group: dict[str, Any]) -> bool:
    """Return whether a param group must be divided. Not collective."""
    computes_many = "foreach" in group and (group["foreach"] is not False or bool(group.get("fused")))
    return computes_many and len({_kind(param) for param in group["params"]}) > 1


def divide_groups(optimizer: Optimizer) -> None:
    """Divide mixed param groups of an optimizer, in place, until `join_groups`. Not collective.

    Args:
        optimizer: An optimizer that is about to step. If an earlier step raised, its groups are joined first.
    """
    join_groups(optimizer)
    divided: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {}
        for param in group["params"] if is_mixed(group) else ():
            kinds.setdefault(_kind(param), []).append(param)
        divided += [{**group, "params": params} for params in kinds.values()] or [group]
    if len(divided) > len(optimizer.param_groups):
        vars(optimizer)[_KEPT] = list(optimizer.param_groups)
        optimizer.param_groups[:] = divided


def join_groups(optimizer: Optimizer) -> None:
    """Put back what `divide_groups` divided, with the settings that the step has changed. Not collective."""
    whole: list[dict[str, Any]] | None = vars(optimizer).pop(_KEPT, None)
    if whole is None:
        return
    parts = iter(optimizer.param_groups)
    for group in whole:
        part = next(parts)
        left = len(group["params"]) - len(part["params"])
        if part is not group:
            group.update({name: value for name, value in part.items() if name != "params"})
        while left > 0:
            left -= len(next(parts)["params"])
    optimizer.param_groups[:] = whole


def _kind(param: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a parameter. Models of one process often have equal meshes, which kernels take together."""
    return param.device_mesh if isinstance(param, DTensor) else None
