"""Turns what went wrong in a directory into an error of ours, which names the file and can travel between ranks."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.checkpoint.files.disk import not_written, of_file
from mmfsdp.errors import FormatError, MmfsdpError

__all__ = ["as_checkpoint_error"]


class as_checkpoint_error:  # noqa: N801 - reads as a statement
    """Turns any failure (a full disk, an object that cannot be pickled) into a `CheckpointError` that names the file.

    Other ranks can receive such an error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FormatError):
            raise of_file(error, self._path) from error.__cause__
        if isinstance(error, Exception) and not isinstance(error, MmfsdpError):
            raise not_written(self._path, error) from error
