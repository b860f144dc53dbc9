"""Finds parameters and buffers that another library has divided over ranks, and says what to shard instead."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import torch.nn as nn

from mmfsdp.errors import PlanError

__all__ = ["check_plain"]


def check_plain(model: nn.Module) -> None:
    """Raise if a parameter or buffer is a DTensor: tensor and expert parallelism make them.

    Args:
        model: A model that is about to be planned or sharded.

    Raises:
        PlanError: One is a DTensor; the message gives its name, placements and mesh, and says what can be sharded.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # it takes time to import, and nothing is a DTensor without it
    fqn, tensor = next(((fqn, tensor) for fqn, tensor in _tensors(model) if _is_distributed(tensor)), ("", None))
    if tensor is None:
        return
    free = [name for name, child in model.named_children() if _is_free(child)]
    part = f"model.{free[0]}" if free else "model.part"
    kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Buffer"
    raise PlanError(
        f"{kind} {fqn!r} is distributed already: a DTensor placed as {tuple(tensor.placements)} on the mesh "
        f"{_mesh(tensor.device_mesh)}. mmfsdp does not yet shard modules that tensor or expert parallelism has "
        f"divided. Shard the modules beside them, over the ranks that get different batches: mmfsdp.shard({part}, "
        'config, mesh["shard"]). docs/howto/frameworks.md has an example. If the model is part of a sharded one, plan '
        "the original model.",
        fqn=fqn,
    )


def _tensors(model: nn.Module) -> Any:
    return chain(model.named_parameters(), model.named_buffers())


def _is_free(module: nn.Module) -> bool:
    """Return whether a module has parameters, and all are plain."""
    held = [tensor for _, tensor in _tensors(module)]
    return bool(held) and not any(map(_is_distributed, held))


def _is_distributed(tensor: Any) -> bool:
    return isinstance(tensor, sys.modules["torch.distributed.tensor"].DTensor)


def _mesh(mesh: Any) -> str:
    sizes = tuple(mesh.mesh.shape)
    names = mesh.mesh_dim_names
    if names is None:
        return f"({' x '.join(map(str, sizes))})"
    return "(" + ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=True)) + ")"
