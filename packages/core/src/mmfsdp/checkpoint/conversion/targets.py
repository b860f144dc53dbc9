"""Where a conversion writes to: what a target on disk and one in a store have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.conversion.selection import Intent
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.files.planned_files import Progress
from mmfsdp.checkpoint.formats.format import Format
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.errors import ConfigError

__all__ = ["Companion", "Target", "part_of_source", "paths_of"]

Companion = Path | bytes
"""A file beside the weights: one that is copied, or its content."""


@dataclass(frozen=True)
class Target(ABC):
    """A file or a directory that a conversion writes. The calls come in this order: one of each, `write` if at all."""

    path: Path
    """Where it will appear."""
    format: Format
    """Its format."""
    chosen: Conversion
    """The settings."""

    @abstractmethod
    def refuse_source(self, layout: Layout) -> None:
        """Raise if writing would replace what is read.

        Raises:
            ConfigError: The target is part of the source.
        """

    @abstractmethod
    def check(self, intent: Intent, beside: Mapping[str, Companion]) -> int:
        """Check that the target may be written, and return how many bytes are free there; 0 for a store.

        Args:
            intent: What will be written.
            beside: The files beside the weights, by name.

        Raises:
            TargetExistsError: The target exists, and is not to be replaced.
            ConfigError, CheckpointError: It cannot be written.
        """

    @abstractmethod
    def write(self, intent: Intent, beside: Mapping[str, Companion], progress: Progress | None) -> Path:
        """Write everything, and return where it is: complete, or not at all.

        Args:
            intent: What is written.
            beside: The files beside the weights, by name.
            progress: Called with the bytes copied so far and the bytes to copy.

        Raises:
            CorruptCheckpointError: Source data is damaged.
            CheckpointError: The target cannot be written.
        """


def part_of_source(target: Path) -> ConfigError:
    """Return the error for a target that is part of the source."""
    return ConfigError(f"The target {str(target)!r} is part of the source. Choose another path.", file=str(target))


def paths_of(layout: Layout, *, remote: bool) -> list[Path]:
    """Return the paths of a source that lie in stores, or those that lie on this machine.

    Args:
        layout: The source.
        remote: Which of them.
    """
    paths = [layout.path, *(origin.path for origin in layout.origins), *layout.files()]
    return [path for path in paths if is_remote(path) == remote]
