"""A directory in a store such as S3, through fsspec: its files, its checkpoints, and the job that opened it last."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.masking import hide_secrets, mask_secrets
from mmfsdp.checkpoint.files.disk import checkpoint_path
from mmfsdp.checkpoint.manifest import MANIFEST_NAME
from mmfsdp.checkpoint.remote.over_fsspec import fsspec_store
from mmfsdp.checkpoint.remote.pacing import call_within
from mmfsdp.checkpoint.remote.urls import WEB, Url
from mmfsdp.errors import CheckpointError, ConfigError, MmfsdpError, RunDirectoryError
from mmfsdp.saving.directory.disk import Directory, DiskDirectory, Hold, names_of_damaged

__all__ = ["Store", "check_store", "open_directory", "open_store"]

_HOLDER = "holder.json"

T = TypeVar("T")


class Store:
    """A directory of checkpoints in a store such as S3; see `Directory`.

    A file appears there whole. Nothing can be locked, or renamed in one step.

    Args:
        path: A URL that `mmfsdp.checkpoint.files.disk.checkpoint_path` has opened.

    Raises:
        ConfigError: The store cannot be written, or its driver is not installed.
    """

    def __init__(self, path: Path) -> None:
        url: Url = path.url  # type: ignore[attr-defined]
        if url.scheme in WEB:
            raise ConfigError(f"Checkpoints cannot be saved to {str(url)!r}. Use a path, or a store such as s3://.")
        self.path = path
        self._store, to_path = fsspec_store(url)
        self._root = to_path(url.full).rstrip("/")

    def hold(self) -> Hold:
        """Note that this job has opened the directory. The job before it gets an error at its next save."""
        return _Holder(self)

    def checkpoints(self, is_wanted: Callable[[str], object]) -> list[str]:
        """Return the names of the checkpoints that are complete and pass a test by name."""
        return [name for name in self.names() if is_wanted(name) and self.is_complete(name)]

    def set_aside(self, name: str) -> str:
        """Move a damaged checkpoint to another name, and return that."""
        taken = self.names()
        target = next(new for new in names_of_damaged(name) if new not in taken)
        self.move(name, target)
        return target

    def remove_remains(self, is_wanted: Callable[[str], object]) -> None:
        """Remove the checkpoints that killed saves have left without a manifest, of those that pass a test by name."""
        for name in self.names():
            if is_wanted(name) and not self.is_complete(name):
                self.remove(name)

    def names(self, name: str = "") -> list[str]:
        """Return the names of what lies right below the directory, or below one in it."""
        checkpoint_path = self._path(name)
        try:
            found = self._called(lambda: self._store.ls(checkpoint_path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = checkpoint_path.strip("/")
        return sorted(str(one).rstrip("/").rpartition("/")[2] for one in found if str(one).strip("/") != own)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; ``None`` if it is missing."""
        try:
            return bytes(self._called(lambda: self._store.cat_file(self._path(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it."""
        self._called(lambda: self._store.pipe_file(self._path(name), data), len(data))

    def send(self, file: Path, name: str) -> None:
        """Copy a file of this machine into the store."""
        self._called(lambda: self._store.put_file(str(file), self._path(name)), file.stat().st_size)

    def is_complete(self, name: str) -> bool:
        """Tell whether a checkpoint is whole: a single file, or a directory with a manifest, which is written last."""
        names = self.names(name)
        return MANIFEST_NAME in names or not names

    def remove(self, name: str) -> None:
        """Remove a file or directory; the manifest goes first, so that a failure leaves an incomplete checkpoint."""
        if MANIFEST_NAME in (names := self.names(name)):
            self._called(lambda: self._store.rm_file(self._path(f"{name}/{MANIFEST_NAME}")))
        if names or self.read_size(name) is not None:
            self._called(lambda: self._store.rm(self._path(name), recursive=bool(names)))

    def move(self, name: str, new: str) -> None:
        """Move a file or directory. It is copied file by file, the manifest last, and then removed."""
        names = self.names(name)
        for each in sorted(names, key=lambda each: each == MANIFEST_NAME):
            self._copy(f"{name}/{each}", f"{new}/{each}")
        if not names:
            self._copy(name, new)
        self.remove(name)

    def read_size(self, name: str) -> int | None:
        """Return the size of a file; ``None`` if it is missing or a directory."""
        try:
            found: Any = self._called(lambda: self._store.info(self._path(name)))
        except FileNotFoundError:
            return None
        return None if found.get("type") == "directory" else int(found["size"])

    def _copy(self, name: str, new: str) -> None:
        self._called(lambda: self._store.cp_file(self._path(name), self._path(new)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _called(self, call: Callable[[], T], size: int = 0) -> T:
        self._store.invalidate_cache()
        try:
            return call_within(call, size)
        except (FileNotFoundError, NotADirectoryError, MmfsdpError):
            raise
        except Exception as error:  # each driver has errors of its own
            reason = mask_secrets(str(error)).strip().rstrip(".") or type(error).__name__
            raise CheckpointError(f"The store says {reason!r}.", file=str(self.path)) from hide_secrets(error)


class _Holder:
    """This job, as the one that has opened a directory last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own = {"host": os.uname().nodename, "pid": os.getpid(), "token": secrets.token_hex(8)}
        store.write(_HOLDER, json.dumps(self._own).encode())

    def check(self) -> None:
        held = self._store.read(_HOLDER)
        if held is not None and (holder := json.loads(held)) != self._own:
            raise RunDirectoryError(
                f"Process {holder.get('pid', '?')} on host {holder.get('host', '?')!r} has opened the directory of "
                "this run. This job saves nothing more: end it, or let the other one use another directory.",
                file=str(self._store.path),
            )

    def release(self) -> None:
        pass  # the next job may take the directory at any time


def open_directory(path: str | Path) -> Directory:
    """Return a directory on this machine, or in a store if the path is a URL. Not collective; nothing is created.

    Raises:
        ConfigError: The URL is malformed, or the store's driver is not installed; or it is one of the web.
    """
    target = checkpoint_path(path)
    return Store(target) if is_remote(target) else DiskDirectory(target)


def open_store(path: str | Path) -> Store | None:
    """Return the directory that a URL names in a store; ``None`` for a path on this machine. Not collective.

    Raises:
        ConfigError: The URL is malformed, or the store's driver is not installed; or it is one of the web.
    """
    directory = open_directory(path)
    return directory if isinstance(directory, Store) else None


def check_store(path: Path, kind: str) -> None:
    """Raise a ``ConfigError`` if a checkpoint of some kind cannot be written to a path in a store."""
    if is_remote(path) and kind == "hf":
        raise ConfigError(
            "kind='hf' needs a file system, as all ranks write into the same files. Save kind='sharded', and convert "
            "it: mmfsdp-cli convert SOURCE TARGET --to hf --like FOLDER."
        )
