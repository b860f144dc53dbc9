"""Notices weights that a model of transformers ties, and that dividing the model has untied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from mmfsdp.errors import PlanError

__all__ = ["check_tied"]


def check_tied(model: nn.Module) -> None:
    """Check that weights of a divided model are still one parameter, where its own record says so. Not collective.

    Nothing is raised if their values differ: then they were untied on purpose.

    Args:
        model: A model that is about to be planned. Models of transformers keep the record, since its version 5.

    Raises:
        PlanError: Two parameters of equal values were one before the model was divided.
    """
    for fqn, owner in model.named_modules():
        recorded = getattr(owner, "all_tied_weights_keys", None)
        if not isinstance(recorded, Mapping) or not callable(getattr(owner, "tie_weights", None)):
            continue
        params = dict(owner.named_parameters(remove_duplicate=False))
        for names in recorded.items():
            one, other = (params.get(name) for name in names)
            if one is None or other is None or one is other or not _are_divided_copies(one, other):
                continue
            first, second = (f"{fqn}.{name}" if fqn else name for name in names)
            raise PlanError(
                f"{type(owner).__name__} ties {first!r} to {second!r}, yet they are two parameters of equal values: "
                "parallelize_module unties in silence. Tie them again after you have divided the model, before you "
                f"shard it: {f'model.{fqn}' if fqn else 'model'}.tie_weights().",
                fqn=first,
            )


def _are_divided_copies(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.is_meta or other.is_meta or not (_divisions(one) or _divisions(other)):
        return False
    first, second = _part(one, other), _part(other, one)
    return first.shape == second.shape and torch.equal(first, second)


def _divisions(tensor: Any) -> list[tuple[int, int, int]]:
    """Return by which dimensions a DTensor is divided, with this rank's coordinate and the number of parts."""
    if not hasattr(tensor, "placements"):
        return []
    mesh = tensor.device_mesh
    return [
        (placement.dim, mesh.get_local_rank(axis), mesh.size(axis))
        for axis, placement in enumerate(tensor.placements)
        if placement.is_shard()
    ]


def _part(tensor: Any, other: Any) -> torch.Tensor:
    """Return what this rank holds of ``tensor``, without what it does not hold of ``other``."""
    own = _divisions(tensor)
    local: torch.Tensor = tensor.detach().to_local() if hasattr(tensor, "placements") else tensor.detach()
    for dim, coordinate, parts in _divisions(other):
        if (dim, coordinate, parts) not in own:
            pieces = local.chunk(parts, dim)
            local = pieces[coordinate] if coordinate < len(pieces) else local.narrow(dim, 0, 0)
    return local
