"""The writers of all formats. Each imports its module when it is called: a conversion needs one of them."""

from __future__ import annotations

from mmfsdp.checkpoint.formats.source import Content
from mmfsdp.checkpoint.layout import PlannedFile

__all__ = [
    "dcp",
    "gguf",
    "huggingface",
    "rank_local",
    "safetensors",
    "safetensors_index",
    "torch_zip",
]


def dcp(content: Content) -> list[PlannedFile]:
    """Plan the files of the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.dcp_writer import plan_write

    return plan_write(content)


def gguf(content: Content) -> list[PlannedFile]:
    """Plan the files of the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.gguf.gguf_files import plan_write

    return plan_write(content)


def huggingface(content: Content) -> list[PlannedFile]:
    """Plan the files of the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.huggingface.folder_weights import plan_write

    return plan_write(content)


def rank_local(content: Content) -> list[PlannedFile]:
    """Plan the files of the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.rank_local import plan_write

    return plan_write(content)


def safetensors(content: Content) -> list[PlannedFile]:
    """Plan the files of the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.safetensors import plan_write

    return plan_write(content)


def safetensors_index(content: Content) -> list[PlannedFile]:
    """Plan the files of the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.shard_indexes import plan_write

    return plan_write(content)


def torch_zip(content: Content) -> list[PlannedFile]:
    """Plan the files of the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.torch_zip_writer import plan_write

    return plan_write(content)
