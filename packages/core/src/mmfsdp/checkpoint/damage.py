"""The errors that say that a part of a checkpoint is damaged, changed while it was read, or may not be read."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.errors import CheckpointPermissionError, CorruptCheckpointError

__all__ = ["changed_while_read", "damaged", "not_permitted"]


def damaged(what: str, why: object, file: object, offset: int | None = None) -> CorruptCheckpointError:
    """Return the error for a part of a checkpoint that is damaged.

    Args:
        what: The part, as in ``'The header of model.safetensors'``.
        why: The finding, without a full stop. For an exception that any content can raise, its type is said as well.
        file: The file.
        offset: Where in the file, in bytes.
    """
    said = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    position = {} if offset is None else {"offset": offset}
    return CorruptCheckpointError(f"{what} is damaged: {said}.", file=str(file), **position)


def changed_while_read(name: str, who: str, file: object) -> CorruptCheckpointError:
    """Return the error for a file that is no longer the one that was opened.

    Args:
        name: Its name.
        who: Who did what, and when to read it again.
        file: The file.
    """
    return CorruptCheckpointError(f"{name} changed while it was read: {who}", file=str(file))


def not_permitted(path: Path, error: OSError) -> CheckpointPermissionError:
    """Return the error for a path that the user of this process may not read.

    Args:
        path: What is read.
        error: The system's error, which names a file or a directory.
    """
    where = str(error.filename or path)
    return CheckpointPermissionError(
        f"{path.name} cannot be read: this process has no permission for {where!r}. Let its user read files and enter "
        "directories there, or run as another user.",
        file=str(path),
    )
