"""Decides which of the ranks that hold the same part of a tensor write it, so that each writes as much."""

from __future__ import annotations

import math
from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.basics.boxes import EvenBoxes
from mmfsdp.collective.scopes import rank_in
from mmfsdp.runtime.dtensors import boxes_of

__all__ = ["written_boxes"]


def written_boxes(
    tensor: DTensor, written: dict[int, dict[int, int]], mesh: DeviceMesh | None = None
) -> tuple[EvenBoxes, bool]:
    """Return which ranks write a tensor: the replica that has the least to write so far; and whether this one does.

    Every rank computes the same answer by itself, since only the size of the whole tensor counts. Not collective.

    Args:
        tensor: The tensor; this rank is part of its mesh. All ranks take the same tensors in the same order.
        written: By number of replicas, the bytes that each replica writes; updated. Empty for the first tensor.
        mesh: The ranks that write, if the tensor's own mesh is a part of them. Default: its own.

    Raises:
        StateDictError: See `boxes_of`.
    """
    mesh = mesh or tensor.device_mesh
    boxes = boxes_of(tensor, mesh)
    if not tensor.dim():
        return boxes, True  # every rank writes its own, as a tensor without dimensions cannot be empty
    loads = written.setdefault(boxes.replicas, dict.fromkeys(range(boxes.replicas), 0))
    replica = min(loads, key=lambda index: (loads[index], index))
    loads[replica] += math.prod(tensor.shape) * tensor.element_size()
    boxes = replace(boxes, replica=replica)
    return boxes, boxes.is_written_by(rank_in(mesh))
