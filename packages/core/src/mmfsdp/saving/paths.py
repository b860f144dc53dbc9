"""Checks that all ranks name the same path before they read or write there."""

from __future__ import annotations

import os
from pathlib import Path

from mmfsdp.collective.steps import Scope, all_equal, gather_objects
from mmfsdp.errors import RankMismatchError

__all__ = ["same_path"]


def same_path(path: str | Path, scope: Scope) -> Path:
    """Return the absolute path that all ranks gave. Collective: every rank of the scope.

    Raises:
        RankMismatchError: Ranks gave different paths, or relative paths in different working directories.
    """
    own = os.path.abspath(path)
    if all_equal(scope, own):
        return Path(own)
    given = gather_objects(scope, own)
    other = next(place for place, path in enumerate(given) if path != given[0])
    raise RankMismatchError(
        f"Ranks gave different paths of a checkpoint: rank 0 {given[0]!r}, rank {other} {given[other]!r}. Give the "
        "same path on every rank. If a name contains the time, make it on one rank and broadcast it."
    )
