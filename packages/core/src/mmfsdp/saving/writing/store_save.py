"""Writes a checkpoint to a store from all ranks: each sends its own files, and the manifest comes last."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmfsdp.checkpoint.files.atomic import TargetExistsError
from mmfsdp.checkpoint.manifest import MANIFEST_NAME, manifest_bytes
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import gather_to_first, on_all_ranks, shared
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.directory.store import Store
from mmfsdp.saving.writing.publishing import DirectorySave, Files

__all__ = ["StoreSave", "refuse_in_store"]


@dataclass(frozen=True)
class StoreSave(DirectorySave):
    """One save of a directory in a store. Each rank writes into a temporary directory of its own on this machine."""

    @classmethod
    def begin(cls, target: Path, scope: Scope, *, overwrite: bool) -> StoreSave:
        """Remove the remains of a killed save at the target. Collective: every rank of the scope.

        Args:
            target: Where the directory will appear; the same on every rank.
            scope: The ranks that save.
            overwrite: See `refuse_in_store`.

        Raises:
            CheckpointError: The store cannot be written, or there is a checkpoint; raised on every rank.
        """

        def create() -> str | None:
            if not scope.is_first:
                return None
            refuse_in_store(target, overwrite=overwrite)
            with as_checkpoint_error(target):
                Store(target.parent).remove(target.name)
            return secrets.token_hex(8)

        save_id = shared(create, scope)
        temporary = on_all_ranks(lambda: Path(tempfile.mkdtemp(prefix="mmfsdp-")), scope)
        return cls(target, temporary, save_id, scope.rank, scope.size, overwrite)

    def finish(self, write: Callable[[DirectorySave], Files], scope: Scope) -> None:
        """Write on every rank, send, and send the manifest. Collective: every rank of the scope.

        Args:
            write: See `DirectorySave.finish`.
            scope: The ranks that save.

        Raises:
            CheckpointError: The checkpoint could not be written; raised on every rank, and what was sent is removed.
        """

        def send(files: Files) -> None:
            with as_checkpoint_error(self.target):
                store = Store(self.target)
                for name in files:
                    store.send(self.temporary / name, name)
                    (self.temporary / name).unlink()

        def complete(parts: list[Files] | None) -> None:
            if parts is None:
                return
            with as_checkpoint_error(self.target):
                files = {name: entry for part in parts for name, entry in part.items()}
                data = manifest_bytes(save_id=self.save_id, world_size=self.world_size, files=files)
                Store(self.target).write(MANIFEST_NAME, data)

        def carry_out() -> None:
            own = on_all_ranks(lambda: write(self), scope)
            on_all_ranks(lambda: send(own), scope)
            parts = gather_to_first(scope, own)
            on_all_ranks(lambda: complete(parts), scope)

        try:
            self._or_abandon(carry_out)
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was sent so far. Not collective."""
        if self.rank == 0:
            with contextlib.suppress(Exception):  # why the save failed matters more; a later save removes it
                Store(self.target.parent).remove(self.target.name)


def refuse_in_store(target: Path, *, overwrite: bool) -> None:
    """Raise a ``TargetExistsError`` if there is a checkpoint. A directory in a store cannot be replaced in one step."""
    with as_checkpoint_error(target):
        store = Store(target.parent)
        is_file = store.read_size(target.name) is not None
        is_there = is_file or (MANIFEST_NAME in store.names(target.name))
    if is_there and not (overwrite and is_file):
        raise TargetExistsError(
            f"{str(target)!r} exists already, and a directory in a store cannot be replaced in one step. Choose "
            "another path, or remove it first.",
            file=str(target),
        )
