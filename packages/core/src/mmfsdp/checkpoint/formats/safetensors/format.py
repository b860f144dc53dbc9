"""The formats of safetensors: one file, and a directory of files per rank."""

from __future__ import annotations

import re

from mmfsdp.checkpoint.formats.common.format import Format, TensorFormat
from mmfsdp.checkpoint.formats.common.source import CheckpointContent, SourcePath, looks_like_safetensors
from mmfsdp.checkpoint.layout import Layout, PlannedFile

__all__ = ["SafetensorsFormat", "SafetensorsRanksFormat"]


class SafetensorsFormat(TensorFormat):
    """A safetensors file."""

    name = "safetensors"
    description = "a safetensors file"
    suffixes = (".safetensors",)

    def recognises(self, source: SourcePath) -> bool:
        return looks_like_safetensors(source.head)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.safetensors.safetensors_files import read

        return read(source)

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        from mmfsdp.checkpoint.formats.safetensors.safetensors_files import plan_write

        return plan_write(content)


class SafetensorsRanksFormat(Format):
    """Safetensors files of ranks, which do not say how many ranks there were."""

    name = "safetensors_ranks"
    description = "a directory of safetensors files per rank, as torch's HuggingFaceStorageWriter leaves them"
    directory = True
    file_names = re.compile(r".*\.safetensors", re.DOTALL)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.safetensors.safetensors_files import read_ranks

        return read_ranks(source)

    def notes(self, layout: Layout) -> tuple[str, ...]:
        files = f"files of {layout.world_size} ranks" if layout.world_size > 1 else "the file of one rank"
        return (f"read: {files} of {layout.path.name}; how many there were is not written anywhere",)
