"""A path on a server that readers of checkpoints use as they use a `pathlib.Path`; nothing can be written to it."""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import stat
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mmfsdp.basics.descriptors import RemoteLike, publish
from mmfsdp.checkpoint.remote.files import RemoteFile, RemoteStream
from mmfsdp.checkpoint.remote.reading_ahead import ReadAhead
from mmfsdp.checkpoint.remote.sessions import Session
from mmfsdp.checkpoint.remote.transports import DeniedError
from mmfsdp.checkpoint.remote.urls import Url, check_writable

# Readers are annotated with Path. At run time it is none: everything that would open a file of this machine fails.
if TYPE_CHECKING:
    _Base = Path
else:
    _Base = object

__all__ = ["RemotePath", "remote_path"]


def remote_path(text: str, *, to_write: bool = False) -> Path:
    """Return the path of a URL, with a session of its own: what is known of the files is read anew.

    Raises:
        ConfigError: The URL is malformed, or no driver for it is installed, or it is to be written and cannot be.
    """
    url = Url.of(text)
    if to_write:
        check_writable(url)  # before a driver is asked for that would not help
    return RemotePath(url, Session.of(url))


class RemotePath(RemoteLike, _Base):
    """A file or a directory on a server.

    Args:
        url: Where it is.
        session: What is known of the server's files. Paths that are derived from this one share it, so that they all
            see the same state of a file.
    """

    def __init__(self, url: Url, session: Session) -> None:
        self._url = url
        self._session = session

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePath, (self._url, self._session)

    def __str__(self) -> str:
        return str(self._url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: Any) -> bool:
        return self._url.path < other._url.path if isinstance(other, RemotePath) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: Any) -> RemotePath:
        return RemotePath(self._url.child(str(name)), self._session)

    @property
    def url(self) -> Url:
        """Where it is."""
        return self._url

    @property
    def name(self) -> str:
        return self._url.name

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]

    @property
    def stem(self) -> str:
        return os.path.splitext(self.name)[0]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._url.parent, self._session)

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def absolute(self) -> RemotePath:
        return self

    def is_relative_to(self, other: Any, *_: Any) -> bool:
        inside = f"{self._url.path}/".startswith(f"{other._url.path}/") if isinstance(other, RemotePath) else False
        return inside and self._url.host == other._url.host

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        info = self._session.info(self._url)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        mode = stat.S_IFDIR if info.directory else stat.S_IFREG
        return os.stat_result((mode, 0, 0, 1, 0, 0, info.size, 0, 0, 0))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._session.info(self._url) is not None

    def is_file(self, *_: Any, **__: Any) -> bool:
        return self._session.file_info(self._url) is not None

    def is_offered(self) -> bool:
        try:
            return self.is_file()
        except DeniedError:
            return False

    def is_dir(self, *_: Any, **__: Any) -> bool:
        info = self._session.info(self._url)
        return info is not None and info.directory

    def iterdir(self) -> Generator[RemotePath, None, None]:
        for name in self._session.names(self._url):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any, **__: Any) -> Any:
        if mode != "rb":
            raise io.UnsupportedOperation(f"{self} cannot be opened with mode {mode!r}: it is only read, as bytes")
        raw = RemoteStream(self.descriptor())
        return raw if buffering == 0 else io.BufferedReader(raw, 1 << 18)

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return cast(bytes, file.read())

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def identity(self) -> str:
        info = self._session.file(self._url)
        return f"{info.size} bytes, {info.identity}"

    def descriptor(self, ahead: object = None) -> int:
        return publish(RemoteFile(self._session, self._url, ahead if isinstance(ahead, ReadAhead) else None))

    def read_ahead(self, extents: Iterable[tuple[object, int, int]]) -> ReadAhead:
        there = ((path, begin, end) for path, begin, end in extents if isinstance(path, RemotePath))
        return ReadAhead((path._session, path._url, begin, end) for path, begin, end in there)
