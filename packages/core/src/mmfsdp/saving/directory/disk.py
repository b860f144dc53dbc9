"""A directory of checkpoints on a disk, and its common base with a directory in a store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from mmfsdp.checkpoint.files.atomic import atomic_output
from mmfsdp.checkpoint.files.siblings import Lease, remove_all_leftovers, targets_of, writer
from mmfsdp.checkpoint.retention import remove_checkpoint, remove_remains
from mmfsdp.errors import RunDirectoryError

__all__ = ["Directory", "DiskDirectory", "Hold", "names_of_damaged", "take_lease"]

_LEASE = ".mmfsdp-run-lease"


class Hold(Protocol):
    """That this job is the one that writes into a directory."""

    def check(self) -> None:
        """Raise a ``RunDirectoryError`` if another job has taken the directory since."""

    def release(self) -> None:
        """Let other jobs have the directory."""


class Directory(Protocol):
    """A directory of checkpoints, on a disk or in a store. Not collective: for one rank."""

    path: Path
    """Where it is; it need not exist."""

    def hold(self) -> Hold:
        """Make this job the one that writes there.

        Raises:
            RunDirectoryError: Another job holds the directory, and holds it until it ends.
            OSError: It cannot be created.
            CheckpointError: It is in a store that cannot be written.
        """

    def checkpoints(self, is_wanted: Callable[[str], object]) -> list[str]:
        """Return the names of the checkpoints that pass a test by name; in a store only those with all their files."""

    def set_aside(self, name: str) -> str | None:
        """Rename a damaged checkpoint, and return its new name, ``step_8.damaged``; None if it is not there."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint."""

    def remove_remains(self, is_wanted: Callable[[str], object]) -> None:
        """Remove what killed saves and removals have left of checkpoints that pass a test. No save may be running."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is missing."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it."""


class DiskDirectory:
    """A directory on a disk; see `Directory`.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def hold(self) -> Hold:
        """Create the directory, take its lease, and remove what killed saves have left, at whatever step."""
        self.path.mkdir(parents=True, exist_ok=True)
        lease = take_lease(self.path / _LEASE)
        try:
            remove_all_leftovers(self.path, lease)
        except BaseException:
            lease.release()
            raise
        return _Leased(lease)

    def checkpoints(self, is_wanted: Callable[[str], object]) -> list[str]:
        """Return names, also of checkpoints whose replacement was interrupted."""
        names = {*os.listdir(self.path), *targets_of(self.path)} if self.path.is_dir() else ()
        return sorted(filter(is_wanted, names))

    def set_aside(self, name: str) -> str | None:
        """Rename in one step."""
        if not os.path.lexists(self.path / name):
            return None  # its replacement was interrupted
        target = next(new for new in names_of_damaged(name) if not os.path.lexists(self.path / new))
        os.rename(self.path / name, self.path / target)
        return target

    def remove(self, name: str) -> None:
        """Move a checkpoint away in one step, for `remove_remains` to remove."""
        remove_checkpoint(self.path / name)

    def remove_remains(self, is_wanted: Callable[[str], object]) -> None:
        """Remove what was moved away, whatever its name."""
        remove_remains(self.path)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing."""
        file = self.path / name
        return file.read_bytes() if file.exists() else None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which appears whole."""
        self.path.mkdir(parents=True, exist_ok=True)  # it may have been lost since the run began
        with atomic_output(self.path / name, overwrite=True) as temporary:
            temporary.write_bytes(data)


class _Leased:
    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def check(self) -> None:
        pass  # nobody can take a lease from its holder

    def release(self) -> None:
        self._lease.release()


def names_of_damaged(name: str) -> Iterator[str]:
    """Yield ``step_8.damaged``, ``step_8.damaged-2``, ``step_8.damaged-3``, ..."""
    yield f"{name}.damaged"
    for number in itertools.count(2):
        yield f"{name}.damaged-{number}"


def take_lease(path: Path) -> Lease:
    """Take the lease of a directory, or say which process has it.

    Args:
        path: The file of the lease.

    Raises:
        RunDirectoryError: Another process has it.
    """
    lease = Lease.take(path)
    if lease is None:
        holder = writer(path)
        raise RunDirectoryError(
            f"Process {holder.get('pid', '?')} on host {holder.get('host', '?')!r} is using the directory of this run. "
            "Wait until it and the processes forked from it have ended, or end them; if it is another run, choose "
            "another directory.",
            file=str(path.parent),
        )
    return lease
