"""Writes a checkpoint directory from all ranks; the directory appears complete or not at all."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.checkpoint.files.atomic import commit, discard, refuse_existing, temporary_sibling
from mmfsdp.checkpoint.files.disk import make_parent, sync
from mmfsdp.checkpoint.manifest import FileEntry, write_manifest
from mmfsdp.collective.channels import host_of
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import gather_to_first, on_all_ranks, shared
from mmfsdp.errors import CheckpointError
from mmfsdp.saving.directory.errors import as_checkpoint_error

__all__ = ["DirectorySave", "Files", "sees"]

Files = dict[str, FileEntry]
"""Each file's entry in the manifest, by file name."""

_LOOK_AGAIN = 10  # times, 0.1 s apart: clients of network file systems cache that a file was missing


def sees(path: Path) -> bool:
    """Tell whether this rank sees what the first one made. Not collective; waits a second before it says no."""
    for _ in range(_LOOK_AGAIN):
        if path.exists():
            return True
        time.sleep(0.1)
    return False


@dataclass(frozen=True)
class DirectorySave:
    """One save of a directory by several ranks."""

    target: Path
    """Where the directory will appear."""
    temporary: Path
    """Where it is written."""
    save_id: str
    """Sixteen hexadecimal digits, the same on every rank."""
    rank: int
    """This rank's index among the ranks that save."""
    world_size: int
    """How many ranks save."""
    overwrite: bool
    """Whether to replace what is at the target once the new directory is complete."""

    @classmethod
    def begin(cls, target: Path, scope: Scope, *, overwrite: bool) -> DirectorySave:
        """Create the temporary directory, and check that all ranks see it. Collective: every rank of the scope.

        Args:
            target: Where the directory will appear; the same on every rank.
            scope: The ranks that save.
            overwrite: Replace what is there.

        Raises:
            CheckpointError: The directory cannot be created, a host does not see it, or the target exists and
                ``overwrite`` is False; raised on every rank, and nothing is left behind.
        """
        made: list[Path] = []

        def create() -> tuple[Path, str, str]:
            if not overwrite:
                refuse_existing(target)
            with as_checkpoint_error(target):
                make_parent(target)
                temporary = temporary_sibling(target, exclusive=not overwrite)
                made.append(temporary)
                temporary.mkdir()
            return temporary, secrets.token_hex(8), host_of()

        try:
            temporary, save_id, first_host = shared(lambda: create() if scope.is_first else None, scope)
        except BaseException:  # a rank may be gone, once the directory is there
            for each in made:
                with contextlib.suppress(OSError):
                    discard(each)
            raise
        save = cls(target, temporary, save_id, scope.rank, scope.size, overwrite)
        save._or_abandon(lambda: on_all_ranks(lambda: save._look(first_host), scope))
        return save

    def finish(self, write: Callable[[DirectorySave], Files], scope: Scope) -> None:
        """Write on every rank, add the manifest, and move everything into place. Collective: every rank of the scope.

        Args:
            write: Writes this rank's files into `temporary`, syncs them, and returns them. It may be collective.
            scope: The ranks that save.

        Raises:
            CheckpointError: The checkpoint could not be written; raised on every rank, and nothing is left behind.
        """

        def complete(parts: list[Files] | None) -> None:
            if parts is None:
                return
            with as_checkpoint_error(self.target):
                files = {name: entry for part in parts for name, entry in part.items()}
                write_manifest(self.temporary, save_id=self.save_id, world_size=self.world_size, files=files)
                # Each rank synced its own files: on a network file system only the client that wrote a file can.
                for entry in (self.temporary / "manifest.json", self.temporary):
                    sync(entry)
                commit(self.temporary, self.target, overwrite=self.overwrite, fsync=False)
                sync(self.target.parent)

        def carry_out() -> None:
            own = on_all_ranks(lambda: write(self), scope)
            parts = gather_to_first(scope, own)
            on_all_ranks(lambda: complete(parts), scope)

        self._or_abandon(carry_out)

    def abandon(self) -> None:
        """Remove what was written so far; the target is untouched. Not collective."""
        if self.rank == 0:
            discard(self.temporary)

    def _or_abandon(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except BaseException:
            with contextlib.suppress(OSError):  # why the save failed matters more: the directory may be lost, too
                self.abandon()
            raise

    def _look(self, first_host: str) -> None:
        if sees(self.temporary):
            return
        raise CheckpointError(
            f"{str(self.target.parent)!r} is not the same directory on all hosts: rank 0 created a directory there on "
            f"host {first_host!r}, but host {host_of()!r} does not see it. Save to a file system that all hosts share, "
            "or save with kind='full', which rank 0 writes alone. Nothing was written.",
            file=str(self.target),
        )
