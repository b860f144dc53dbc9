"""Reads open files by their descriptor: files of the system, and files to which another module gives a number.

Readers of checkpoints work on descriptors. A file on a server gets a negative one, which the system never hands out.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable

__all__ = [
    "RemoteLike",
    "VirtualFile",
    "close",
    "expect",
    "is_remote",
    "prefetch",
    "publish",
    "read_at",
    "read_into",
    "size_of",
]


class VirtualFile(ABC):
    """A file that the system does not know."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Its length in bytes."""

    @abstractmethod
    def read_into(self, view: memoryview, at: int) -> int:
        """Read bytes from an offset on; return how many. There may be fewer than fit; 0 means the end of the file."""

    @abstractmethod
    def prefetch(self, extents: Iterable[tuple[int, int]]) -> None:
        """Read some short extents at the same time and keep them; each is an offset and a length in bytes."""

    @abstractmethod
    def expect(self, extents: Iterable[tuple[int, int]]) -> None:
        """Learn what will be read in which order, each an offset and a length in bytes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that it holds."""


class RemoteLike(ABC):
    """A path that `os.open` cannot open; it behaves like a `pathlib.Path` that is only read."""

    @abstractmethod
    def descriptor(self, ahead: object = None) -> int:
        """Open it; return a descriptor. ``ahead`` is what `read_ahead` returned, if it was called."""

    @abstractmethod
    def is_offered(self) -> bool:
        """Tell whether it is a file that the server lets us read."""

    @abstractmethod
    def identity(self) -> str:
        """Return what changes when the file does."""

    @abstractmethod
    def read_ahead(self, extents: Iterable[tuple[object, int, int]]) -> object:
        """Return what reads extents before they are asked for: path, offset and end of each, in the order of use."""


def is_remote(path: object) -> bool:
    """Tell whether a path lies on a server."""
    return isinstance(path, RemoteLike)


_FIRST = -1000  # -1 and its neighbours mean "no file" in many calls, and -100 the current directory
_files: dict[int, VirtualFile] = {}
_numbers = itertools.count(_FIRST, -1)


def publish(file: VirtualFile) -> int:
    """Return a descriptor for a file, valid until it is closed."""
    number = next(_numbers)
    _files[number] = file
    return number


def read_at(descriptor: int, count: int, at: int) -> bytes:
    """Return up to ``count`` bytes from an offset on: fewer only at the end of the file.

    Raises:
        OSError: The file cannot be read.
    """
    if descriptor >= 0:
        return os.pread(descriptor, count, at)
    file = _files[descriptor]
    data = bytearray(max(0, min(count, file.size - at)))
    view, done = memoryview(data), 0
    while done < len(view) and (got := file.read_into(view[done:], at + done)):
        done += got
    return bytes(view[:done])


def read_into(descriptor: int, view: memoryview, at: int) -> int:
    """Read bytes from an offset on; return how many, which is 0 only at the end.

    Raises:
        OSError: The file cannot be read.
    """
    if descriptor >= 0:
        return os.preadv(descriptor, [view], at)
    return _files[descriptor].read_into(view, at)


def size_of(descriptor: int) -> int:
    """Return the length of an open file in bytes."""
    return os.fstat(descriptor).st_size if descriptor >= 0 else _files[descriptor].size


def prefetch(descriptor: int, extents: Iterable[tuple[int, int]]) -> None:
    """Say which short extents will be read next, each an offset and a length; a file of the system ignores it."""
    if descriptor < 0:
        _files[descriptor].prefetch(extents)


def expect(descriptor: int, extents: Iterable[tuple[int, int]]) -> None:
    """Say which extents will be read in which order, each an offset and a length; a file of the system ignores it."""
    if descriptor < 0:
        _files[descriptor].expect(extents)


def close(descriptor: int) -> None:
    """Close an open file.

    Raises:
        CorruptCheckpointError: A file on a server changed while it was open.
    """
    if descriptor >= 0:
        os.close(descriptor)
    elif (file := _files.pop(descriptor, None)) is not None:
        file.close()
