"""The checksums of the blocks of a checkpoint's files, which every rank can look up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, FileEntry, read_manifest
from mmfsdp.checkpoint.manifest_search import find_entry, have_blocks
from mmfsdp.saving.writing.embedded_sums import embedded_sums

__all__ = ["FileSums", "file_sums"]


class FileSums:
    """The checksums of the blocks of files; it can be sent to other ranks.

    Args:
        known: Entries that are known by now; all of them, unless there is a directory.
        directory: A directory whose manifest has checksums of the blocks of all its files. It stays there: each rank
            looks up the files that it reads in part, so that messages do not grow with their number.
    """

    def __init__(self, known: Mapping[Path, FileEntry] | None = None, directory: Path | None = None) -> None:
        self._known, self._directory = known or {}, directory
        self._found: dict[Path, FileEntry | None] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        return self._known, self._directory

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def of_all_files(self) -> bool:
        """Whether every file of the checkpoint has them."""
        return self._directory is not None

    def of(self, file: Path) -> FileEntry | None:
        """Return the entry of a file; ``None`` if its blocks have no checksums. Not collective.

        Raises:
            CheckpointError: The manifest cannot be read any more.
        """
        if self._directory is None or file.parent != self._directory:
            return self._known.get(file)
        if file not in self._found:
            self._found[file] = find_entry(self._directory, file.name)
        return self._found[file]


def file_sums(layout: Layout) -> FileSums:
    """Return the checksums of a checkpoint: of its manifest, or those that a ``.pth`` file holds of itself.

    Raises:
        CheckpointError: The manifest is damaged, or what the file holds.
    """
    if not layout.path.is_dir() or not (layout.path / MANIFEST_NAME).exists():
        return FileSums(embedded_sums(layout))
    if have_blocks(layout.path):
        return FileSums(directory=layout.path)
    files = read_manifest(layout.path).files
    return FileSums({layout.path / name: entry for name, entry in files.items() if entry.blocks is not None})
