"""Targets of conversions: the base of targets on disk and in stores, and the one on disk.

The latter is written to a hidden sibling, which appears in one step.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.conversion.output import check_output, published_path
from mmfsdp.checkpoint.conversion.selection import Intent
from mmfsdp.checkpoint.conversion.settings import Conversion
from mmfsdp.checkpoint.files.atomic import (
    commit,
    discard,
    journal_of,
    leave,
    refuse_existing,
    refuse_other_content,
    temporary_sibling,
)
from mmfsdp.checkpoint.files.disk import copy_here, located, refuse_missing_parent, remove, write_errors
from mmfsdp.checkpoint.files.journal import Journal
from mmfsdp.checkpoint.files.planned_files import Progress, write_files
from mmfsdp.checkpoint.formats.common.format import Format
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import write_manifest
from mmfsdp.errors import CheckpointError, ConfigError

__all__ = ["Companion", "ConversionTarget", "DiskTarget", "part_of_source", "paths_of"]

Companion = Path | bytes
"""A file beside the weights: one that is copied, or its content."""


@dataclass(frozen=True)
class ConversionTarget(ABC):
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


class DiskTarget(ConversionTarget):
    """A target on a disk of this machine."""

    @property
    def _replaces(self) -> bool:
        return self.chosen.overwrite or self.chosen.publish

    def refuse_source(self, layout: Layout) -> None:
        with write_errors(self.path):
            refuse_missing_parent(self.path)
            target = located(self.path)
            if not target.exists():
                return
            files = paths_of(layout, remote=False)
            # A directory that holds a source file would be replaced together with it; a file in the directory of a
            # source may be its metadata, or hold nothing but numbers.
            home = target.resolve()
            inside = target.is_dir() and any(file.resolve().is_relative_to(home) for file in files)
            within = target.is_file() and any(file.is_dir() and home.is_relative_to(file.resolve()) for file in files)
            if inside or within or any(os.path.samefile(target, file) for file in files):
                raise part_of_source(target)

    def check(self, intent: Intent, beside: Mapping[str, Companion]) -> int:
        free = shutil.disk_usage(located(self.path).parent).free
        if not self._replaces:
            refuse_existing(self.path)
        return free

    def write(self, intent: Intent, beside: Mapping[str, Companion], progress: Progress | None) -> Path:
        chosen, target = self.chosen, self.path
        if not chosen.resume:  # a part of it may be there already
            _check_space(target, sum(intent.files.values()))
        with write_errors(target):
            refuse_other_content(target, beside)
            temporary = temporary_sibling(target, exclusive=not self._replaces, resume=chosen.resume)
            try:
                self._fill(temporary, intent, progress)
                for name, file in beside.items():
                    if isinstance(file, bytes):
                        (temporary / name).write_bytes(file)
                    else:
                        copy_here(file, temporary / name)
                final = published_path(target, temporary) if chosen.publish else target
                commit(temporary, final, overwrite=chosen.overwrite, fsync=chosen.fsync)
            except BaseException:  # an interrupt must not leave a half-written file either
                if chosen.resume:
                    leave(temporary)
                else:
                    discard(temporary)
                raise
            if chosen.resume:
                remove(journal_of(temporary))
        return final

    def _fill(self, temporary: Path, intent: Intent, progress: Progress | None) -> None:
        chosen = self.chosen
        journal = Journal(journal_of(temporary), self.path, intent.planned) if chosen.resume else None
        try:
            entries = write_files(
                temporary,
                intent.planned,
                verify=chosen.verify,
                progress=progress,
                jobs=chosen.jobs,
                fsync=chosen.fsync,
                journal=journal,
            )
        finally:
            if journal is not None:
                journal.close()
        if self.format.directory:
            write_manifest(temporary, save_id=intent.save_id, world_size=intent.world_size, files=entries)
        if chosen.verify_output:
            check_output(temporary, intent.written, trust=chosen.trust, progress=progress)


def _check_space(target: Path, needed: int) -> None:
    """Raise if a target cannot fit on its disk."""
    free = shutil.disk_usage(located(target).parent).free
    if needed > free:
        raise CheckpointError(
            f"There is no room for {target.name}: it needs {needed} bytes, and {free} are free.", file=str(target)
        )
