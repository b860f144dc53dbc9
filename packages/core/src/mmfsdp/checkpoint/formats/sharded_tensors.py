"""Reads pickled ``ShardedTensor`` objects of ``torch.distributed`` without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmfsdp.checkpoint.formats.stored_tensors import StoredTensor
from mmfsdp.checkpoint.pickles.unpickling import fields, integers

__all__ = ["StoredShards", "stored_shards"]


@dataclass(frozen=True, slots=True)
class StoredShards:
    """A ``ShardedTensor`` of ``torch.distributed`` as one rank's archive holds it."""

    dtype: str
    """Canonical dtype name."""
    shape: tuple[int, ...]
    """Global shape in elements."""
    parts: tuple[tuple[StoredTensor, tuple[int, ...]], ...]
    """The shards of this rank, each with the offsets of its box."""
    rank: int
    """Which rank wrote it."""
    world_size: int
    """Number of ranks that the tensor is spread over."""


def stored_shards(state: Any) -> StoredShards:
    """Read the state of a pickled ``ShardedTensor`` (torch/distributed/_shard/sharded_tensor/api.py, __getstate__)."""
    shards, metadata, group, _spec, _rrefs = state
    ranks = fields(group)
    if ranks["local_world_size"] != ranks["global_world_size"]:
        raise ValueError("a tensor is sharded over only some of the ranks")
    described = fields(metadata)
    properties = fields(described["tensor_properties"])
    dtype = properties["dtype"] if "dtype" in properties else properties[0]
    parts = []
    for shard in shards:
        held = fields(shard)
        tensor, box = held["tensor"], fields(held["metadata"])
        if not isinstance(tensor, StoredTensor) or tensor.shape != integers(box["shard_sizes"]):
            raise ValueError("a shard does not have the size that its description says")
        parts.append((tensor, integers(box["shard_offsets"])))
    rank, world_size = integers((ranks["local_rank"], ranks["local_world_size"]))
    return StoredShards(dtype.qualname, integers(described["size"]), tuple(parts), rank, world_size)
