"""Writes, lists and removes the files of a run in a store such as S3, through fsspec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.masking import hide_secrets, mask_secrets
from mmfsdp.checkpoint.files.disk import place
from mmfsdp.checkpoint.manifest import MANIFEST_NAME
from mmfsdp.checkpoint.remote.over_fsspec import fsspec_store
from mmfsdp.checkpoint.remote.pacing import call_within
from mmfsdp.checkpoint.remote.urls import WEB, Url
from mmfsdp.errors import CheckpointError, ConfigError, MmfsdpError

__all__ = ["Store", "check_store", "open_store"]

T = TypeVar("T")


class Store:
    """A directory in a store. A file appears there whole; nothing can be locked, or renamed in one step.

    Args:
        path: A URL that `mmfsdp.checkpoint.files.disk.place` has opened.

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

    def names(self, name: str = "") -> list[str]:
        """Return the names of what lies right below the directory, or below one in it."""
        place = self._place(name)
        try:
            found = self._called(lambda: self._store.ls(place, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = place.strip("/")
        return sorted(str(one).rstrip("/").rpartition("/")[2] for one in found if str(one).strip("/") != own)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; ``None`` if it is missing."""
        try:
            return bytes(self._called(lambda: self._store.cat_file(self._place(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it."""
        self._called(lambda: self._store.pipe_file(self._place(name), data), len(data))

    def send(self, file: Path, name: str) -> None:
        """Copy a file of this machine into the store."""
        self._called(lambda: self._store.put_file(str(file), self._place(name)), file.stat().st_size)

    def is_complete(self, name: str) -> bool:
        """Tell whether a checkpoint is whole: a single file, or a directory with a manifest, which is written last."""
        names = self.names(name)
        return MANIFEST_NAME in names or not names

    def remove(self, name: str) -> None:
        """Remove a file or directory; the manifest goes first, so that what is left when this fails is incomplete."""
        if MANIFEST_NAME in (names := self.names(name)):
            self._called(lambda: self._store.rm_file(self._place(f"{name}/{MANIFEST_NAME}")))
        if names or self.read_size(name) is not None:
            self._called(lambda: self._store.rm(self._place(name), recursive=bool(names)))

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
            found: Any = self._called(lambda: self._store.info(self._place(name)))
        except FileNotFoundError:
            return None
        return None if found.get("type") == "directory" else int(found["size"])

    def _copy(self, name: str, new: str) -> None:
        self._called(lambda: self._store.cp_file(self._place(name), self._place(new)))

    def _place(self, name: str) -> str:
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


def open_store(path: str | Path) -> Store | None:
    """Return the directory that a URL names in a store; ``None`` for a path on this machine. Not collective.

    Raises:
        ConfigError: The URL is malformed, or the store's driver is not installed; or it is one of the web.
    """
    target = place(path)
    return Store(target) if is_remote(target) else None


def check_store(path: Path, kind: str) -> None:
    """Raise a ``ConfigError`` if a checkpoint of some kind cannot be written to a path in a store."""
    if is_remote(path) and kind == "hf":
        raise ConfigError(
            "kind='hf' needs a file system, as all ranks write into the same files. Save kind='sharded', and convert "
            "it: mmfsdp-cli convert SOURCE TARGET --to hf --like FOLDER."
        )
