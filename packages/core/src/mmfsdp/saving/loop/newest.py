"""Resumes from the newest checkpoint that can be loaded: past a damaged one it goes on to the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["resume_newest"]

T = TypeVar("T")


def resume_newest(candidates: Iterable[tuple[str, Callable[[], T]]], tell: Callable[[str], object]) -> T | None:
    """Load the newest checkpoint that is not damaged. Collective: every rank.

    Args:
        candidates: The checkpoints, the newest first, the same on every rank: the name of each in messages, and the
            function that loads it. The next one is asked for only after the one before has turned out to be damaged.
        tell: Called with a message about each damaged one.

    Returns:
        The result of loading, or None if the run has no checkpoint that is whole.
    """
    for name, load in candidates:
        try:
            return load()
        except (CorruptCheckpointError, IncompleteCheckpointError) as error:
            tell(f"Skipped {name}, which is damaged: {error}")
    return None
