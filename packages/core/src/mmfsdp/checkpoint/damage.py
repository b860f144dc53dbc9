"""The errors that say that a part of a checkpoint is damaged, or changed while it was read."""

from __future__ import annotations

from mmfsdp.errors import CorruptCheckpointError

__all__ = ["changed_while_read", "damaged"]


def damaged(what: str, why: object, file: object, offset: int | None = None) -> CorruptCheckpointError:
    """Return the error for a part of a checkpoint that is damaged.

    Args:
        what: The part, as in ``'The header of model.safetensors'``.
        why: The finding, without a full stop. For an exception that any content can raise, its type is said as well.
        file: The file.
        offset: Where in the file, in bytes.
    """
    said = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    place = {} if offset is None else {"offset": offset}
    return CorruptCheckpointError(f"{what} is damaged: {said}.", file=str(file), **place)


def changed_while_read(name: str, who: str, file: object) -> CorruptCheckpointError:
    """Return the error for a file that is no longer the one that was opened.

    Args:
        name: Its name.
        who: Who did what, and when to read it again.
        file: The file.
    """
    return CorruptCheckpointError(f"{name} changed while it was read: {who}", file=str(file))
