"""Errors that say which file they are about; what the operating system says while one is written becomes one."""

from __future__ import annotations

import errno
from pathlib import Path

from mmfsdp.errors import CheckpointError, MmfsdpError

__all__ = ["not_written", "of_file", "writing"]

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
    """Return the error for a target that could not be written; nothing of it is left.

    Args:
        target: What was to be written.
        error: What went wrong. An error of the operating system behind it counts for more than itself: torch's writer
            puts words of its own in front.
        rank: Where, if it was on another rank.
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


class writing:  # noqa: N801 - reads as a statement
    """Errors of the operating system become ours, which say that it is this target that cannot be written.

    Args:
        target: What is written within the block.
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
