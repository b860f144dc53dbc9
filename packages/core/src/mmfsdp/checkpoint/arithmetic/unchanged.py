"""Notices that a checkpoint changed between a first reading, which decides what is written, and the last byte."""

from __future__ import annotations

from collections.abc import Iterable

from mmfsdp.checkpoint.files.disk import changed, identity
from mmfsdp.checkpoint.files.planned_files import Progress
from mmfsdp.checkpoint.layout import Layout

__all__ = ["Unchanged"]


class Unchanged:
    """A ``progress`` of ``convert`` that raises if a file of a source has changed once everything is read.

    Nothing has appeared at the target then, so nothing does.

    Args:
        layouts: The sources, before they are read first.
        progress: Called each time, as by ``convert``.
    """

    def __init__(self, layouts: Iterable[Layout], progress: Progress | None) -> None:
        self._progress = progress
        self._known = {file: identity(file) for layout in layouts for file in layout.files()}

    def __call__(self, done: int, total: int) -> None:
        """Compare the files when all is done.

        Raises:
            CorruptCheckpointError: One has changed.
        """
        if done >= total:
            for file, known in self._known.items():
                if identity(file) != known:
                    raise changed(file)
        if self._progress is not None:
            self._progress(done, total)
