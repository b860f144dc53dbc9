"""Plans ``local`` checkpoints, a file of ``torch.save`` per rank; ``rank_local`` describes the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmfsdp.basics.boxes import Ranks, sharded_box
from mmfsdp.checkpoint.files.writing import PlannedFile
from mmfsdp.checkpoint.formats.registry import Content
from mmfsdp.checkpoint.formats.torch_zip_writer import plan_file
from mmfsdp.checkpoint.geometry import cut
from mmfsdp.checkpoint.layout import TensorEntry, TensorRef
from mmfsdp.checkpoint.tree import map_leaves, unique_name
from mmfsdp.errors import FormatError

__all__ = ["plan_write"]


def plan_write(content: Content) -> list[PlannedFile]:
    """Plan the file of each rank.

    Tensors are divided by rows, as ``fully_shard`` does; those without a dimension are whole on every rank.

    Raises:
        FormatError: Two paths in the tree are the same text, so a file could not say which one it means.
    """
    tree, ranks = content.tree, content.ranks
    if not isinstance(tree, dict) or "mmfsdp" in tree:
        raise FormatError("A checkpoint per rank is a mapping, and its key 'mmfsdp' says what each file is part of.")
    return [_plan_rank(tree, content.tensors, rank, ranks, content.save_id) for rank in range(ranks.count)]


def _plan_rank(
    tree: dict[Any, Any], tensors: Mapping[str, TensorEntry], rank: int, ranks: Ranks, save_id: str
) -> PlannedFile:
    boxes: dict[str, dict[str, Any]] = {}
    held: dict[str, TensorEntry] = {}

    def localise(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        entry = tensors[leaf.name]
        if not entry.shape:
            held[leaf.name] = entry
            return leaf
        if unique_name(path, boxes) != path:
            raise FormatError(f"Two tensors lie at {path!r}; a checkpoint per rank could not tell them apart.")
        offsets, sizes = sharded_box(entry.shape, [ranks.shards], [0], [ranks.shard(rank)])
        boxes[path] = {
            "shape": list(entry.shape),
            "offsets": list(offsets),
            "placements": [None, 0],
            "replica": 0,
        }
        held[leaf.name] = cut(entry, offsets, sizes)
        return leaf

    content = map_leaves(tree, localise)
    content["mmfsdp"] = {
        "format": "rank_local",
        "version": 1,
        "world_size": ranks.count,
        "rank": rank,
        "save_id": save_id,
        "mesh": [ranks.replicas, ranks.shards],
        "tensors": boxes,
    }
    return plan_file(f"rank{rank}.pth", content, held)
