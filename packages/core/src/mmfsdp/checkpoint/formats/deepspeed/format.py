"""The format of DeepSpeed's checkpoints."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.formats.common.source import LATEST_FILES, OF_DEEPSPEED, SourcePath
from mmfsdp.checkpoint.layout import Layout

__all__ = ["DeepSpeedFormat", "of_deepspeed_within"]


class DeepSpeedFormat(Format):
    """A checkpoint of DeepSpeed, or the directory above it."""

    name = "deepspeed"
    description = (
        "a directory of DeepSpeed: ZeRO stages 0 to 3, a universal checkpoint, or the one with its file latest"
    )
    directory = True

    def recognises(self, source: SourcePath) -> bool:
        if any(name.endswith(OF_DEEPSPEED) for name in source.names):
            return True
        return any((source.path / name).is_file() for name in source.names if name in LATEST_FILES)

    def read(self, source: SourcePath) -> Layout:
        from mmfsdp.checkpoint.formats.deepspeed.saves import read

        return read(source)


def of_deepspeed_within(path: Path) -> str | None:
    """Return the name of DeepSpeed's checkpoint within a folder of weights, as transformers' Trainer writes both."""
    if is_remote(path) or not (path / "latest").is_file():
        return None
    try:
        names = [name for name in SourcePath(path).names if (path / name).is_dir()]
        return next(
            (name for name in names if any(file.endswith(OF_DEEPSPEED) for file in SourcePath(path / name).names)), None
        )
    except OSError:
        return None
