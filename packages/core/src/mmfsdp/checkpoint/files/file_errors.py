"""Turns errors of the operating system into ours, which name the file and say what to do."""

from __future__ import annotations

import errno
from pathlib import Path

from mmfsdp.errors import CheckpointError, CorruptCheckpointError, MmfsdpError

__all__ = ["not_written", "of_file", "read_errors", "truncated", "write_errors"]

_ROOM = "Make room on that disk, or choose a path on another."
_PLACE = "Choose a directory that you may write to."
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "Its file system, or the limit that `ulimit -f` shows, allows no larger file. Raise the limit, choose "
    "another disk, or write a format of several files.",
    errno.EACCES: _PLACE,
    errno.EPERM: _PLACE,
    errno.EROFS: _PLACE,
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EMFILE: "Raise the limit that `ulimit -n` shows.",
}


def not_written(target: Path, error: BaseException, *, rank: int | None = None) -> CheckpointError:
    """Return the error for a target that could not be written and was removed.

    Args:
        target: The file or directory that was to be written.
        error: The error. If an error of the operating system caused it, that one is reported: torch's writer wraps it
            in one of its own.
        rank: The rank that failed, if it was another one.
    """
    cause = _system_error(error)
    if cause is None:
        text = f"{type(error).__name__}: {error}"
        return CheckpointError(f"{target.name} cannot be written: {text}", file=str(target), rank=rank)
    advice = f" {_ADVICE[cause.errno]}" if cause.errno in _ADVICE else ""
    text = f"{target.name} cannot be written: {cause.strerror or cause}.{advice}"
    return CheckpointError(text, file=str(target), rank=rank)


def of_file(error: MmfsdpError, file: Path) -> MmfsdpError:
    """Return an error that says which file it is about: itself if it says so already."""
    return error if "file" in error.context else type(error)(error.message, **{**error.context, "file": str(file)})


def truncated(file: Path, name: str, offset: int) -> CorruptCheckpointError:
    """Return the error for a file that ends at byte ``offset``, within a tensor."""
    return CorruptCheckpointError(
        f"{file.name} is truncated: it ends within tensor {name!r}.", file=str(file), offset=offset
    )


class read_errors:  # noqa: N801 - reads as a statement
    """A context manager that turns errors of the operating system into ours: this file cannot be read.

    Args:
        file: The file that the block reads. The caller reports a missing file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            reason = error.strerror or error
            raise CheckpointError(f"{self._file.name} cannot be read: {reason}.", file=str(self._file)) from error


class write_errors:  # noqa: N801 - reads as a statement
    """A context manager that turns errors of the operating system into ours: this target cannot be written.

    Args:
        target: The file or directory that the block writes.
    """

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise not_written(self._target, error) from error


def _system_error(error: BaseException | None) -> OSError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
