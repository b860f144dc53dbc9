"""Plans safetensors files of limited size with Hugging Face's index: ``model.safetensors.index.json``.

https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from mmfsdp.checkpoint.files.planned_files import PlannedFile
from mmfsdp.checkpoint.formats.safetensors_file import plan_safetensors
from mmfsdp.checkpoint.layout import TensorEntry

__all__ = ["plan_safetensors_shards", "plan_shards"]

_INDEX = "model.safetensors.index.json"


def plan_shards(tensors: Mapping[str, TensorEntry], max_shard_size: int) -> dict[str, list[str]]:
    """Return which file holds which tensors, in the order of the checkpoint.

    Args:
        tensors: Name to tensor.
        max_shard_size: Bytes of tensor data per file. A larger tensor gets a file of its own.
    """
    groups: list[list[str]] = []
    size = 0
    for name, entry in tensors.items():
        if not groups or (size + entry.nbytes > max_shard_size and size > 0):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += entry.nbytes
    groups = groups or [[]]
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def plan_safetensors_shards(tensors: Mapping[str, TensorEntry], max_shard_size: int) -> list[PlannedFile]:
    """Plan the files and their index; see ``plan_safetensors``.

    Args:
        tensors: Name to tensor.
        max_shard_size: Bytes of tensor data per file.
    """
    shards = plan_shards(tensors, max_shard_size)
    files = [plan_safetensors(file, {name: tensors[name] for name in names}) for file, names in shards.items()]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in tensors.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    text = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    return [*files, PlannedFile(_INDEX, len(text), (), lambda _: [(0, text)])]
