"""Lets one job at a time write into a directory: by a lock on a disk, by the name of the job in a store."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.files.disk import place
from mmfsdp.checkpoint.files.siblings import Lease, remove_all_leftovers
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks
from mmfsdp.saving.publishing import as_checkpoint_error
from mmfsdp.saving.run_directory import LEASE_NAME, take_directory
from mmfsdp.saving.store_holder import StoreHolder
from mmfsdp.saving.stores import Store

__all__ = ["HeldDirectory"]


class HeldDirectory:
    """A directory that this job holds until it is closed or the job ends. Making one is collective: every rank.

    What killed saves have left there is removed.

    Args:
        path: A path, which is created if it is missing, or a URL in a store. The same on every rank.
        scope: The ranks.

    Raises:
        RunDirectoryError: A running job holds the directory on a disk; raised on every rank.
        CheckpointError: It cannot be created or written; raised on every rank.
    """

    def __init__(self, path: str | Path, scope: Scope) -> None:
        self._lease: Lease | None = None
        self._holder: StoreHolder | None = None
        self._scope, self._is_store = scope, is_remote(target := place(path))

        def hold() -> None:
            if not scope.is_first:
                return
            with as_checkpoint_error(target):
                if self._is_store:
                    self._holder = StoreHolder(Store(target))
                else:
                    target.mkdir(parents=True, exist_ok=True)
                    self._lease = take_directory(target / LEASE_NAME)
                    remove_all_leftovers(target, self._lease)

        on_all_ranks(hold, scope)

    def check(self) -> None:
        """Raise a ``RunDirectoryError`` if another job has opened the directory in a store. Collective: every rank."""
        if self._is_store:
            on_all_ranks(lambda: self._holder.check() if self._holder is not None else None, self._scope)

    def close(self) -> None:
        """Let other jobs have the directory. Not collective."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
