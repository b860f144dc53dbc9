"""Writes safetensors files of limited size with Hugging Face's index: ``model.safetensors.index.json``.

https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mmfsdp.checkpoint.copying import Progress
from mmfsdp.checkpoint.formats.safetensors_file import write_safetensors
from mmfsdp.checkpoint.layout import TensorEntry

__all__ = ["plan_shards", "write_safetensors_shards"]

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


def write_safetensors_shards(
    directory: Path,
    tensors: Mapping[str, TensorEntry],
    max_shard_size: int,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> int:
    """Write the files and their index into a new directory; see ``write_safetensors``.

    Args:
        directory: The directory to create.
        tensors: Name to tensor.
        max_shard_size: Bytes of tensor data per file.
        verify: Check the stored CRC-32 of every source record.
        progress: Called with the bytes copied so far and their total.

    Returns:
        Bytes of tensor data written.
    """
    directory.mkdir()
    total = sum(entry.nbytes for entry in tensors.values())
    files = plan_shards(tensors, max_shard_size)
    done = 0
    for file, names in files.items():

        def advance(count: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + count, total)

        done += write_safetensors(
            directory / file, {name: tensors[name] for name in names}, verify=verify, progress=advance
        )
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    (directory / _INDEX).write_text(text, encoding="utf-8")
    return done
