"""The formats of directories with a file of ``torch.save`` per rank."""

from __future__ import annotations

import re

from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.common.source import RANK_FILE, CheckpointContent, SourcePath
from mmfsdp.checkpoint.layout import Layout, PlannedFile

__all__ = [
    "DTensorRanksFormat",
    "FairscaleFormat",
    "MMEngineLocalFormat",
    "RankLocalFormat",
    "TorchCheckpointingFormat",
]


class RankLocalFormat(Format):
    """The ``local`` checkpoints of mmfsdp. Each file carries the id of its save."""

    name = "rank_local"
    description = "a directory with a file of torch.save per rank, and a manifest"
    aliases = ("local",)
    directory = True
    file_names = RANK_FILE
    by_rank = True

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.per_rank.rank_local import read

        return read(source)

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        from mmfsdp.checkpoint.formats.per_rank.rank_local import plan_write

        return plan_write(content)

    def may_mix_saves(self, layout: Layout) -> bool:
        return False


class DTensorRanksFormat(Format):
    """Files of ranks that hold DTensors."""

    name = "dtensor_ranks"
    description = (
        "a directory with a file of torch.save per rank that holds DTensors, as verl, accelerate and scripts do"
    )
    directory = True
    file_names = re.compile(r".*rank[_-]?\d{1,9}\.(pt|pth|bin)", re.ASCII)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.per_rank.dtensor_ranks import read

        return read(source)


class TorchCheckpointingFormat(Format):
    """Files of Meta's torch_checkpointing."""

    name = "torch_checkpointing"
    description = "a directory of Meta's torch_checkpointing, with a file of torch.save per item and rank"
    directory = True
    file_names = re.compile(r".+_0\.pt", re.ASCII)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.per_rank.torch_checkpointing import read

        return read(source)


class MMEngineLocalFormat(Format):
    """Local state dicts of FSDP1. The reader of ``rank_local``, whose files have the same names, recognises them."""

    name = "mmengine_local"
    description = "a directory with a file of torch.save per rank from FSDP1, as stock MMEngine 0.8 to 0.10 saves it"
    directory = True

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.per_rank.mmengine_local import read

        return read(source)


class FairscaleFormat(Format):
    """Local state dicts of fairscale's FSDP."""

    name = "fairscale"
    description = "a directory with a file per rank of fairscale's FSDP: its local state dict, and the metadata"
    directory = True
    file_names = re.compile(r".*shard[_-]?\d{1,9}\.(pt|pth|bin|torch)|.+[_-]\d{1,9}\.torch", re.ASCII)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.per_rank.fairscale import read

        return read(source)
