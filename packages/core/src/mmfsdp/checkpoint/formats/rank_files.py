"""Finds and reads the ``rank{i}.pth`` files of a ``local`` checkpoint by mmfsdp or stock MMEngine."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.formats.torch_zip import read_tree
from mmfsdp.checkpoint.untrusted import inside
from mmfsdp.errors import CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["RankFiles"]

_NAME = re.compile(r"rank(\d{1,9})\.pth", re.ASCII)


class RankFiles:
    """The files of a directory whose names are those of rank files.

    Args:
        directory: The directory.
        trust: Keep unknown pickled objects as opaque placeholders instead of rejecting them.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: One is a link out of the directory, or not a file.
        CorruptCheckpointError: Two belong to the same rank.
    """

    def __init__(self, directory: Path, *, trust: bool = False) -> None:
        self.directory = directory
        self.paths: Mapping[int, Path] = _found(directory)
        """Rank to file, in order."""
        self.trust = trust
        """Whether unknown pickled objects are kept."""

    @functools.cached_property
    def first(self) -> tuple[Path, Any]:
        """The file of the lowest rank, and its content: a ``PickledTensor`` for each tensor.

        Raises:
            FormatError, UnsafePickleError, CorruptCheckpointError: It cannot be read.
        """
        path = next(iter(self.paths.values()))
        return path, read_tree(path, trust=self.trust)

    @property
    def of_mmfsdp(self) -> bool:
        """Whether the first file is one of mmfsdp, and not one of stock MMEngine."""
        tree = self.first[1]
        return not isinstance(tree, dict) or "mmfsdp" in tree

    def read(self, rank: int) -> Any:
        """Return the content of a rank's file.

        Raises:
            FormatError, UnsafePickleError, CorruptCheckpointError: It cannot be read.
        """
        path = self.paths[rank]
        return self.first[1] if path == self.first[0] else read_tree(path, trust=self.trust)


def _found(directory: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in sorted(entry.name for entry in directory.iterdir()):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        path = inside(directory, name, directory)
        number = int(match[1])
        if number in found:
            raise CorruptCheckpointError(f"{found[number].name} and {name} are both of rank {number}.", file=str(path))
        found[number] = path
    if not found:
        raise CheckpointNotFoundError(f"{directory.name} holds no rank{{i}}.pth.", file=str(directory))
    return dict(sorted(found.items()))
