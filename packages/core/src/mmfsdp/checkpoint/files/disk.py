"""Opens, writes, syncs, renames and removes files; errors name the file and say what to do."""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard, TypeVar, cast

from mmfsdp.basics import descriptors
from mmfsdp.basics.descriptors import RemoteLike, is_remote
from mmfsdp.checkpoint.damage import changed_while_read, not_permitted
from mmfsdp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MmfsdpError,
    closest,
)

__all__ = [
    "OpenFiles",
    "at_home",
    "changed",
    "checkpoint_path",
    "copy_here",
    "exchange",
    "identity",
    "is_offered",
    "located",
    "make_parent",
    "nearest",
    "not_written",
    "of_file",
    "permission_errors",
    "present",
    "read_errors",
    "refuse_empty",
    "refuse_missing_parent",
    "remove",
    "rename_new",
    "sync",
    "truncated",
    "write_all",
    "write_errors",
]

_Error = TypeVar("_Error", bound=MmfsdpError)

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ROOM = "Make room on that disk, or choose a path on another."
_DIRECTORY = "Choose a directory that you may write to."
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "Its file system, or the limit that `ulimit -f` shows, allows no larger file. Raise the limit, choose "
    "another disk, or write a format of several files.",
    errno.EACCES: _DIRECTORY,
    errno.EPERM: _DIRECTORY,
    errno.EROFS: _DIRECTORY,
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EMFILE: "Raise the limit that `ulimit -n` shows.",
}


def checkpoint_path(path: str | os.PathLike[str], *, to_write: bool = False) -> Path:
    """Return the path of a checkpoint that is read or written: on this machine, or on a server if it is a URL.

    Raises:
        ConfigError: It is empty, or is to be written and holds a NUL character. A URL is malformed,
            needs a package that is not installed, or is to be written and cannot be.
    """
    if isinstance(path, RemoteLike):
        return cast(Path, path)
    refuse_empty(path)
    text = os.fspath(path)
    if to_write and text == "-":
        raise ConfigError(
            "'-' does not stand for standard output here, to which nothing is written. Give a file or a directory."
        )
    if to_write and isinstance(text, str) and "\0" in text:
        raise ConfigError(f"{text!r} is not the name of a file: it holds a NUL character.")
    if not isinstance(text, str) or not _REMOTE.match(text) or ("://" not in text and os.path.lexists(text)):
        return Path(path)
    from mmfsdp.checkpoint.remote.paths import remote_path

    return remote_path(text, to_write=to_write)


def refuse_empty(path: str | os.PathLike[str]) -> None:
    """Raise a ``ConfigError`` for an empty path, which pathlib takes for the current directory."""
    if not os.fspath(path):
        raise ConfigError("The path is empty, as of a variable that is not set. For the current directory, write '.'.")


def present(path: Path) -> bool:
    """Tell whether there is anything at a path, a link that leads nowhere included; on a server only a file counts."""
    return is_offered(path) if is_remote(path) else path.exists() or path.is_symlink()


def is_offered(path: Path) -> bool:
    """Tell whether there is a file at a path; one that a server does not let us read does not count."""
    return path.is_offered() if isinstance(path, RemoteLike) else path.is_file()


def copy_here(file: Path, to: Path) -> None:
    """Copy a file to this machine, which it may be on already.

    Raises:
        OSError: It cannot be read or written.
    """
    if isinstance(file, RemoteLike):
        to.write_bytes(file.read_bytes())
        return
    import shutil  # only to copy a file

    shutil.copyfile(file, to)


def not_written(target: Path, error: BaseException, *, rank: int | None = None) -> CheckpointError:
    """Return the error for a target that could not be written and was removed.

    Args:
        target: The file or directory that was to be written.
        error: The error. If an error of the operating system caused it, that one is reported: torch's writer wraps it
            in one of its own.
        rank: The rank that failed, if it was another one.
    """
    cause = _system_error(error)
    kind = CheckpointPermissionError if isinstance(cause, PermissionError) else CheckpointError
    if cause is None:
        text = f"{type(error).__name__}: {error}"
        return CheckpointError(f"{target.name} cannot be written: {text}", file=str(target), rank=rank)
    advice = f" {_ADVICE[cause.errno]}" if cause.errno in _ADVICE else ""
    text = f"{target.name} cannot be written: {cause.strerror or cause}.{advice}"
    return kind(text, file=str(target), rank=rank)


def of_file(error: _Error, file: Path) -> _Error:
    """Return an error that names its file: the given one if it does so already."""
    return error if "file" in error.context else type(error)(error.message, **{**error.context, "file": str(file)})


def truncated(file: Path, name: str, offset: int) -> CorruptCheckpointError:
    """Return the error for a file that ends at byte ``offset``, within a tensor."""
    return CorruptCheckpointError(
        f"{file.name} is truncated: it ends within tensor {name!r}.", file=str(file), offset=offset
    )


class read_errors:  # noqa: N801 - reads as a statement
    """A context manager, for one block after the other, that turns errors of the operating system into ours.

    Args:
        file: The file that the block reads. The caller reports a missing file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if _is_systems(error) and isinstance(error, PermissionError):
            raise not_permitted(self._file, error) from error
        if _is_systems(error) and not isinstance(error, FileNotFoundError):
            advice = f" {_ADVICE[error.errno]}" if error.errno == errno.EMFILE else ""
            text = f"{self._file.name} cannot be read: {error.strerror or error}.{advice}"
            raise CheckpointError(text, file=str(self._file)) from error


@contextmanager
def permission_errors(path: Path) -> Iterator[None]:
    """Turn a missing permission within a block into our error: the file at this path cannot be read."""
    try:
        yield
    except PermissionError as error:
        if not _is_systems(error):
            raise
        raise not_permitted(path, error) from error


@contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Turn errors of the operating system within a block into ours: this target cannot be written."""
    try:
        yield
    except OSError as error:
        if not _is_systems(error):
            raise
        raise not_written(target, error) from error


def _is_systems(error: BaseException | None) -> TypeGuard[OSError]:
    # Some errors of ours are also OSErrors, for callers who catch those; they say what is wrong already.
    return isinstance(error, OSError) and not isinstance(error, MmfsdpError)


def _system_error(error: BaseException) -> OSError | None:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return next((one for one in chain if _is_systems(one)), None)


_OPEN_FILES = 64


class OpenFiles:
    """Keeps the most recently read files open; a context manager that closes them.

    A file that is opened again must be the one that was read before, with the same size and time of change.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._identities: dict[Path, tuple[int, ...]] = {}
        self._expected: Iterable[tuple[Path, int, int]] = ()
        self._ahead: object = None
        self.observer: Callable[[Path, int, memoryview], None] | None = None
        """Called with file, offset and data of the bytes of which blocks of tensors are made."""

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; ``descriptor`` opens them again."""
        while self._files:
            descriptors.close(self._files.popitem()[1])

    def expect(self, extents: Iterable[tuple[Path, int, int]]) -> None:
        """Say what will be read, so that servers are asked for it in time; it means nothing for files of this machine.

        Args:
            extents: Path, offset and end of each, in the order in which they will be read.
        """
        self._expected, self._ahead = extents, None

    def descriptor(self, file: Path) -> int:
        """Return a descriptor of the file for reading. It stays valid until 64 other files have been asked for.

        Raises:
            IncompleteCheckpointError: The file is missing.
            CorruptCheckpointError: The file has changed since it was opened first.
            CheckpointError: The file cannot be opened.
        """
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        if len(self._files) >= _OPEN_FILES:
            descriptors.close(self._files.popitem(last=False)[1])
        try:
            if isinstance(file, RemoteLike):  # whether it changes is found out where it is read
                self._ahead = self._ahead or file.read_ahead(self._expected)
                descriptor = self._files[file] = file.descriptor(self._ahead)
                return descriptor
            with read_errors(file):
                descriptor = self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(f"{file.name} is missing.", file=str(file)) from error
        found = os.fstat(descriptor)
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        if self._identities.setdefault(file, identity) != identity:
            os.close(self._files.pop(file))
            raise changed(file)
        return descriptor


def identity(file: Path) -> str:
    """Return values that change when the content of a file does: size and time, or the server's version tag."""
    if isinstance(file, RemoteLike):
        return file.identity()
    with read_errors(file):
        found = file.stat()
    return f"{found.st_size} bytes, {found.st_mtime_ns}"


def changed(file: Path) -> CorruptCheckpointError:
    """Return the error that says that another process changed a file."""
    who = "another process replaced or rewrote it. Read the checkpoint again when no other process writes to it."
    return changed_while_read(file.name, who, file)


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes at byte ``offset`` of an open file, however many calls that takes."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def located(path: Path) -> Path:
    """Return the absolute path of a target, with links in its parent directories resolved.

    A link at the target itself is not followed: it is replaced, and the file that it points to stays.

    Args:
        path: The target; its directory should exist.
    """
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def make_parent(target: Path) -> None:
    """Create the directories above a target.

    Raises:
        CheckpointError: One of them is a file.
        OSError: They cannot be created.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((path for path in target.parents if path.exists() and not path.is_dir()), target.parent)
        raise CheckpointError(
            f"{str(target)!r} cannot be written: {str(file)!r} is a file, and not a directory. Choose another path.",
            file=str(target),
        ) from error


def refuse_missing_parent(path: Path) -> None:
    """Raise if the directory that should hold a target does not exist.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        ConfigError: A file is there.
    """
    if path.parent.is_file():
        raise ConfigError(
            f"{str(path)!r} cannot be written: {str(path.parent)!r} is a file, and not a directory.", file=str(path)
        )
    if not path.parent.is_dir():
        raise CheckpointNotFoundError(
            f"{str(path)!r} cannot be written: the directory {str(path.parent)!r} does not exist."
            + (at_home(path) or f" Create it first.{nearest(path.parent)}"),
            file=str(path),
        )


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nearest(path: Path) -> str:
    """Return a sentence for a path that does not exist, with similar names in its directory, if there are any."""
    parent = path.absolute().parent
    if is_remote(path):
        return " Check its spelling."
    if str(path) == "-":
        return " Standard input is not read: give a file or a directory."
    if not parent.is_dir():
        return at_home(path) or f" Its directory {str(parent)!r} does not exist either."
    return closest(path.name, [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")])


def at_home(path: Path) -> str:
    """Return a sentence for a path that does not exist and begins with ``~``, which a shell did not replace."""
    if not str(path).startswith("~/"):
        return ""
    return f" '~' is a name here, as only a shell replaces it. Write {str(path.expanduser())!r}."


_NOREPLACE, _EXCHANGE = 1, 2
_HERE = -100  # AT_FDCWD
_REFUSED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


def remove(path: Path) -> None:
    """Remove a file or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        import shutil  # only to remove a directory

        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def exchange(one: Path, two: Path) -> bool:
    """Exchange two paths, each a file or a directory, in one step.

    Returns:
        ``True`` if they were exchanged; ``False`` where the system or the file system cannot do it.

    Raises:
        OSError: The exchange failed; ``FileNotFoundError`` if one of the paths does not exist.
    """
    return _renameat2(one, two, _EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or a directory to a path that does not exist; ``FileExistsError`` if it does."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise _exists(target)
    if not source.is_dir():
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # there are no hard links either: what appears just now would be replaced
            os.rename(source, target)
        else:
            os.unlink(source)
        return
    try:
        os.rename(source, target)  # what has appeared since is replaced only if it is an empty directory
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists(target) from error
        raise


def _exists(target: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    import ctypes  # only to publish a target

    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_HERE, os.fsencode(source), _HERE, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _REFUSED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
