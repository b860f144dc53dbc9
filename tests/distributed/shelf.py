"""A store that fsspec reads and writes as it does S3, and that keeps its files in a directory: ``shelf://tmp/...``."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["url_of"]


class Shelf(LocalFileSystem):
    """Has no locks; directories are there while files are in them; nothing is renamed."""

    protocol = "shelf"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"auto_mkdir": True, **options})

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("shelf://").strip("/")

    def info(self, path: str, **options: Any) -> Any:
        try:
            return super().info(path, **options)
        except NotADirectoryError as error:  # a store has names with slashes, and no directories
            raise FileNotFoundError(path) from error

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in self.find(path) if recursive else [path]:
            self.rm_file(name)

    def ls(self, path: str, detail: bool = False, **options: Any) -> list[Any]:
        found = super().ls(path, detail=False, **options)
        there = [name for name in found if self.isfile(name) or self.find(name)]
        return [self.info(name) for name in there] if detail else there


fsspec.register_implementation("shelf", Shelf, clobber=True)


def url_of(path: Any) -> str:
    """Return the URL of a directory."""
    return f"shelf:/{path}"
