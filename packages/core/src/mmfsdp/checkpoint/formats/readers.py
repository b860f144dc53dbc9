"""The readers of all formats. Each imports its module when it is called: one checkpoint needs few of them."""

from __future__ import annotations

from mmfsdp.checkpoint.formats.source import Source
from mmfsdp.checkpoint.layout import Layout

__all__ = [
    "dcp",
    "dcp_flat",
    "deepspeed",
    "dtensor_ranks",
    "fairscale",
    "huggingface",
    "megatron",
    "mmengine_local",
    "rank_local",
    "safetensors",
    "safetensors_index",
    "safetensors_ranks",
    "torch_checkpointing",
    "torch_index",
    "torch_legacy",
    "torch_zip",
]


def dcp(source: Source) -> Layout:
    """Read a DCP directory; one of FSDP1's ``LOCAL_STATE_DICT`` is put together from its flat parameters."""
    from mmfsdp.checkpoint.formats.dcp import holds_flat_parameters, read_as_stored
    from mmfsdp.checkpoint.formats.dcp_rules import read_by_rules

    layout = (None if source.look_up else read_by_rules(source)) or read_as_stored(source)
    return dcp_flat(source) if holds_flat_parameters(layout) else layout


def dcp_flat(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.fsdp1.dcp_flat import read

    return read(source)


def deepspeed(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.deepspeed.saves import read

    return read(source)


def dtensor_ranks(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.dtensor_ranks import read

    return read(source)


def fairscale(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.fairscale import read

    return read(source)


def huggingface(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.huggingface.folder_weights import read

    return read(source)


def megatron(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.megatron import read

    return read(source)


def mmengine_local(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.fsdp1.mmengine_local import read

    return read(source)


def rank_local(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.rank_local import read

    return read(source)


def safetensors(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.safetensors import read

    return read(source)


def safetensors_index(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.shard_indexes import read

    return read(source)


def safetensors_ranks(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.safetensors import read_ranks

    return read_ranks(source)


def torch_checkpointing(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.torch_checkpointing import read

    return read(source)


def torch_index(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.shard_indexes import read_torch

    return read_torch(source)


def torch_legacy(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.torch_legacy import read

    return read(source)


def torch_zip(source: Source) -> Layout:
    """Read the format of this name; see the module for errors."""
    from mmfsdp.checkpoint.formats.torch_zip import read

    return read(source)
