"""Decides which of the ranks that hold the same part of a tensor write it, so that each writes as much."""

from __future__ import annotations

import math

from torch.distributed.tensor import DTensor

from mmfsdp.runtime.dtensors import placements_of

__all__ = ["share_of"]


def share_of(tensor: DTensor, written: dict[int, dict[int, int]]) -> tuple[int, int]:
    """Return which replica writes a tensor (the one with the least to write so far), and which one this rank is in.

    Every rank computes the same answer by itself, since only the size of the whole tensor counts. Not collective.

    Args:
        tensor: The tensor; this rank is part of its mesh. All ranks take the same tensors in the same order.
        written: By number of replicas, the bytes that each replica writes; updated. Empty for the first tensor.

    Raises:
        StateDictError: The tensor has a placement other than ``Shard`` and ``Replicate``.
    """
    mesh = tensor.device_mesh
    coordinates = tuple(mesh.get_coordinate() or ())
    replicas, mine = 1, 0
    for size, coordinate, dim in zip(mesh.shape, coordinates, placements_of(tensor), strict=True):
        if dim is None:
            replicas, mine = replicas * size, mine * size + coordinate
    if not tensor.dim():
        return 0, 0  # every rank writes its own, as a tensor without dimensions cannot be empty
    loads = written.setdefault(replicas, dict.fromkeys(range(replicas), 0))
    replica = min(loads, key=lambda index: (loads[index], index))
    loads[replica] += math.prod(tensor.shape) * tensor.element_size()
    return replica, mine
