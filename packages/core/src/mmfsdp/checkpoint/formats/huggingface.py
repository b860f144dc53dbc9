"""Reads and plans the weights of a Hugging Face folder: ``model.safetensors``, or several such files and their index.

transformers' ``save_pretrained`` names them so. What else the folder holds, such as ``config.json``, is copied by the
conversion (see ``conversion/model_folders.py``).
"""

from __future__ import annotations

from dataclasses import replace

from mmfsdp.checkpoint.formats import safetensors, shard_indexes
from mmfsdp.checkpoint.formats.registry import INDEX_SUFFIX, MODEL_FILE, Content, Source
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Layout, PlannedFile
from mmfsdp.errors import CheckpointNotFoundError

__all__ = ["plan_write", "read"]


def read(source: Source) -> Layout:
    """Read the layout of a folder's weights; errors as for the formats of its files.

    Other safetensors files in the folder are ignored, as transformers ignores them.

    Raises:
        CheckpointNotFoundError: There are no weights under transformers' names.
    """
    path = source.path
    if MODEL_FILE in source.names:
        layout = safetensors.read(Source(inside(path, MODEL_FILE, path)))
    elif MODEL_FILE + INDEX_SUFFIX in source.names:
        layout = shard_indexes.read(Source(inside(path, MODEL_FILE + INDEX_SUFFIX, path), source.trust))
    else:
        raise CheckpointNotFoundError(f"{path.name} holds neither {MODEL_FILE} nor its index.", file=str(path))
    known = layout.format in ("safetensors", "safetensors_index")
    return replace(layout, path=path, format="huggingface" if known else layout.format)


def plan_write(content: Content) -> list[PlannedFile]:
    """Plan one safetensors file, or, if it would be too large, several and their index.

    Raises:
        ConfigError: The format cannot hold a dtype or a name.
    """
    files = shard_indexes.plan_write(content)
    return files if len(files) > 2 else [safetensors.plan_file(MODEL_FILE, content.named)]
