"""Writes a conversion to a disk: to a hidden sibling of the target, which appears in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from mmfsdp.checkpoint.conversion.output import check_output, published_path
from mmfsdp.checkpoint.conversion.selection import Intent
from mmfsdp.checkpoint.conversion.targets import Companion, Target, part_of_source, paths_of
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
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import write_manifest
from mmfsdp.errors import CheckpointError

__all__ = ["DiskTarget"]


class DiskTarget(Target):
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
