"""The directory that `CheckpointHook` writes to, on a disk or in a store, which one job holds while it trains."""

from __future__ import annotations

import os
from contextlib import suppress

from mmfsdp.collective import Scope, on_all_ranks
from mmfsdp.saving import HeldDirectory, Store, open_store
from mmfsdp_mmengine.checkpoints.folders import is_checkpoint

__all__ = ["Output", "StoreFiles"]


class StoreFiles:
    """The directory of a run in a store, with the methods of MMEngine's file backends that hooks call.

    Args:
        url: Its URL.
        store: The same, opened.
    """

    def __init__(self, url: str, store: Store) -> None:
        self._url, self._store = url, store

    def join_path(self, path: str, *names: str) -> str:
        """Return the URL of what lies below another one."""
        return "/".join([path.rstrip("/"), *names])

    def isfile(self, path: str) -> bool:
        """Return whether there is a file."""
        return self._is_own(path) and self._store.read_size(self._name(path)) is not None

    def isdir(self, path: str) -> bool:
        """Return whether there are files below."""
        return self._is_own(path) and bool(self._store.names(self._name(path)))

    def remove(self, path: str) -> None:
        """Remove a file or directory."""
        self._store.remove(self._name(path))

    rmtree = remove

    def _is_own(self, path: str) -> bool:
        return path.rpartition("/")[0] == self._url.rstrip("/")

    def _name(self, path: str) -> str:
        return path.rpartition("/")[2]


class Output:
    """The directories that this job writes to, until it is closed. Making one is collective: every rank.

    Args:
        work_dir: The runner's directory.
        out_dir: Where checkpoints go: a path, or a URL in a store.
        scope: The ranks.

    Raises:
        RunDirectoryError: Another job uses one of them; raised on every rank.
        CheckpointError: One cannot be written; raised on every rank.
    """

    def __init__(self, work_dir: str, out_dir: str, scope: Scope) -> None:
        self._scope = scope
        self._held: list[HeldDirectory] = []
        store = on_all_ranks(lambda: open_store(out_dir), scope)
        self.files = None if store is None else StoreFiles(out_dir, store)
        """The directory, if it is in a store."""
        paths = dict.fromkeys([os.path.realpath(work_dir), out_dir if store else os.path.realpath(out_dir)])
        try:
            for path in paths:
                self._held.append(HeldDirectory(path, scope))
            if store is not None:
                on_all_ranks(lambda: store.remove_remains(is_checkpoint) if scope.is_first else None, scope)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise a ``RunDirectoryError`` if another job has opened the directory in a store. Collective: every rank."""
        for held in self._held:
            held.check()

    def make_free(self, path: str, newest: str | None) -> str:
        """Return where a directory that belongs at a path can be written. Collective: every rank.

        In a store a directory cannot be replaced in one step. Another checkpoint than the newest one is removed first.

        Args:
            path: The path.
            newest: The checkpoint from which the run would go on.
        """
        if (files := self.files) is None:
            return path
        stem, end = os.path.splitext(path)
        target = path if path != newest else f"{stem}-again{end}"

        def clear() -> None:
            if self._scope.is_first and files.isdir(target):
                files.remove(target)

        on_all_ranks(clear, self._scope)
        return target

    def close(self) -> None:
        """Let other jobs use the directories. Not collective."""
        for held in self._held:
            with suppress(OSError):
                held.close()
        self._held = []
