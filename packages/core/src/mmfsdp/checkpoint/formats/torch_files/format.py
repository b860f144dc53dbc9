"""The formats of files that ``torch.save`` writes: archives, and the streams before version 1.6."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.common.source import CheckpointContent, SourcePath, is_legacy_torch, is_zip
from mmfsdp.checkpoint.layout import Layout, PlannedFile

__all__ = ["TorchLegacyFormat", "TorchZipFormat"]


class TorchZipFormat(Format):
    """An archive of ``torch.save``."""

    name = "torch_zip"
    description = "a file of torch.save"
    aliases = ("pth", "pt")
    suffixes = (".pth", ".pt")

    def recognises(self, source: SourcePath) -> bool:
        return is_zip(source.head)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.torch_files.torch_zip import read

        return read(source)

    def plan_write(self, content: CheckpointContent) -> list[PlannedFile]:
        from mmfsdp.checkpoint.formats.torch_files.torch_zip_writer import plan_write

        return plan_write(content)

    def refuse_part(self, layout: Layout) -> None:
        from mmfsdp.checkpoint.formats.torch_files.model_parts import refuse_part

        refuse_part(layout.path)

    def unchecked(self, layout: Layout) -> list[str]:
        from mmfsdp.checkpoint.formats.torch_files.model_parts import other_part

        return ["the other parts of the model, of which this file holds one"] if other_part(layout.path) else []

    def mapped_file(self, layout: Layout) -> Path | None:
        return layout.path


class TorchLegacyFormat(Format):
    """A file of ``torch.save`` before version 1.6."""

    name = "torch_legacy"
    description = "a file of torch.save before version 1.6"

    def recognises(self, source: SourcePath) -> bool:
        return is_legacy_torch(source.head)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.torch_files.torch_legacy import read

        return read(source)
