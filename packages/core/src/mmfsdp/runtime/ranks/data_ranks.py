"""Numbers the ranks that get different batches, which those of a group for tensor parallelism share."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from mmfsdp.collective.scopes import rank_in
from mmfsdp.planning.mesh import without_stages
from mmfsdp.runtime.dtensors import batch_mesh
from mmfsdp.runtime.sharded_model import find_sharded_model

__all__ = ["data_parallel_rank", "data_parallel_size"]


def data_parallel_rank(model: nn.Module | DeviceMesh) -> int:
    """Return the number of this rank's batches: ``rank`` of a ``DistributedSampler``. Not collective.

    Ranks that tensor parallelism makes one group have the same number, as they compute one batch together.

    Args:
        model: A sharded model, or the mesh that it will be sharded over.

    Raises:
        ShardStateError: The model is not sharded.
    """
    return rank_in(_mesh_of(model))


def data_parallel_size(model: nn.Module | DeviceMesh) -> int:
    """Return how many ranks get different batches: ``num_replicas`` of a ``DistributedSampler``. Not collective.

    Args:
        model: A sharded model, or the mesh that it will be sharded over.

    Raises:
        ShardStateError: The model is not sharded.
    """
    return int(_mesh_of(model).size())


def _mesh_of(model: nn.Module | DeviceMesh) -> DeviceMesh:
    return batch_mesh(without_stages(model) if isinstance(model, DeviceMesh) else find_sharded_model(model).mesh)
