"""Recognises files that are only one rank's part of a checkpoint, and says what to open instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmfsdp.errors import FormatError

__all__ = ["is_of_fairscale", "one_of_many"]

_OF_FAIRSCALE = {"param_metadata", "buffer_names"}


def is_of_fairscale(value: Any) -> bool:
    """Tell whether a part of a file's content is what fairscale's ``local_metadata_dict()`` returns."""
    return isinstance(value, dict) and {*value} >= _OF_FAIRSCALE


def one_of_many(path: Path) -> FormatError:
    """Return the error for a file that is one rank's part."""
    return FormatError(
        f"{path.name} is one rank's part of a sharded checkpoint; open its directory {str(path.parent)!r} instead.",
        file=str(path),
    )
