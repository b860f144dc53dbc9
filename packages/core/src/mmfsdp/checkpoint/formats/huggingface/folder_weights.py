"""Reads and plans the weights of a Hugging Face folder: ``model.safetensors``, or several such files and their index.

``save_pretrained`` of transformers names them so; that of diffusers, ``diffusion_pytorch_model.safetensors``. What else
the folder holds, such as ``config.json``, is copied by the conversion (see ``formats/huggingface/model_folders.py``).
"""

from __future__ import annotations

from dataclasses import replace

from mmfsdp.checkpoint.formats import safetensors, shard_indexes
from mmfsdp.checkpoint.formats.source import INDEX_SUFFIX, MODEL_FILES, Content, Source
from mmfsdp.checkpoint.integrity import inside
from mmfsdp.checkpoint.layout import Layout, PlannedFile
from mmfsdp.errors import CheckpointNotFoundError

__all__ = ["plan_write", "read"]


def read(source: Source) -> Layout:
    """Read the layout of a folder's weights; errors as for the formats of its files.

    Other safetensors files in the folder are ignored, as both libraries ignore them.

    Raises:
        CheckpointNotFoundError: There are no weights under these names.
    """
    path = source.path
    name = next((name for name in MODEL_FILES if name in source.names), None)
    if name is None:
        raise CheckpointNotFoundError(f"{path.name} holds neither {MODEL_FILES[0]} nor its index.", file=str(path))
    file = Source(inside(path, name, path), source.trust)
    layout = shard_indexes.read(file) if name.endswith(INDEX_SUFFIX) else safetensors.read(file)
    known = layout.format in ("safetensors", "safetensors_index")
    return replace(layout, path=path, format="huggingface" if known else layout.format)


def plan_write(content: Content) -> list[PlannedFile]:
    """Plan one safetensors file, or, if it would be too large, several and their index.

    Raises:
        ConfigError: The format cannot hold a dtype or a name.
    """
    files = shard_indexes.plan_write(content)
    return files if len(files) > 2 else [safetensors.plan_file(f"{content.stem}.safetensors", content.named)]
