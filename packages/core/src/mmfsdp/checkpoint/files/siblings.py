"""Names the hidden files beside a target while it is written, moves them, and cleans up after killed processes.

For a target ``a`` they are ``.a.TOKEN.mmfsdp-partial``, what is written; ``.a.TOKEN.mmfsdp-replaced``, what was there
before, where a directory cannot be exchanged in one step; ``.a.TOKEN.mmfsdp-lease``, which the process that writes
keeps locked; ``.a.mmfsdp-claim``, which one process keeps locked that relies on finding nothing at the target; and
``.a.TOKEN.mmfsdp-removed``, an old checkpoint that is about to go.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mmfsdp.checkpoint.files.leases import Lease, is_alive
from mmfsdp.checkpoint.manifest import check_manifest
from mmfsdp.errors import CheckpointError

__all__ = [
    "Kind",
    "claim_of",
    "exchange",
    "interrupted",
    "new_token",
    "remove",
    "remove_leftovers",
    "rename_new",
    "sibling",
    "targets_of",
    "token_of",
]

_NOREPLACE, _EXCHANGE = 1, 2
_HERE = -100  # AT_FDCWD
_REFUSED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_LONGEST = 160  # bytes of the name in that of its sibling


class Kind(enum.StrEnum):
    """What a sibling is."""

    PARTIAL = "mmfsdp-partial"
    REPLACED = "mmfsdp-replaced"
    LEASE = "mmfsdp-lease"
    REMOVED = "mmfsdp-removed"


class _Sibling(NamedTuple):
    path: Path
    token: str
    kind: Kind


def new_token() -> str:
    """Return a token that identifies one attempt to write a target."""
    return secrets.token_hex(8)


def sibling(path: Path, token: str, kind: Kind) -> Path:
    """Return the path of a sibling of a target."""
    return path.with_name(f".{_stem(path)}.{token}.{kind}")


def claim_of(path: Path) -> Path:
    """Return the path of the claim of a target."""
    return path.with_name(f".{_stem(path)}.mmfsdp-claim")


def token_of(temporary: Path) -> str:
    """Return the token in the name of a sibling; a fresh one for any other name."""
    parts = temporary.name.split(".")
    return parts[-2] if parts[-1] in tuple(Kind) and len(parts) > 2 else new_token()


def interrupted(path: Path) -> Path | None:
    """Return the newest complete checkpoint that an interrupted replacement left beside a target that is missing.

    Return ``None`` if the target exists or nothing was left.

    Args:
        path: The target.
    """
    if os.path.lexists(path) or path.name in ("", ".."):
        return None
    found = list(_siblings(path))
    moved = {entry.token for entry in found if entry.kind is Kind.REPLACED}
    # A partial directory whose target was moved aside was finished: only its last rename is missing.
    whole = [
        entry.path
        for entry in found
        if entry.kind is Kind.REPLACED
        or (entry.kind is Kind.PARTIAL and entry.token in moved and _is_whole(entry.path))
    ]
    return max(whole, key=_finished, default=None)


def targets_of(directory: Path) -> set[str]:
    """Return the names of the targets in a directory whose replacement was interrupted."""
    pattern = re.compile(rf"\.(.+)\.[0-9a-f-]+\.{Kind.REPLACED}")
    names = {match[1] for name in os.listdir(directory) if (match := pattern.fullmatch(name))}
    return {name for name in names if interrupted(directory / name) is not None}


def remove_leftovers(path: Path, own: Lease) -> None:
    """Remove what dead processes left beside a target. If one died while it replaced the target, restore the target.

    Files that another process may still be writing stay, and so do files that cannot be removed.

    Args:
        path: The target, as ``located`` returns it.
        own: The lease of this process.
    """
    found = list(_siblings(path))
    guarded = {entry.token for entry in found if entry.kind is not Kind.LEASE}
    dead = []
    for entry in found:
        lease = sibling(path, entry.token, Kind.LEASE)
        if not is_alive(lease, entry.path if entry.token in guarded else None, own):
            dead.append(entry)
    restored = interrupted(path)
    if restored is not None and restored in {entry.path for entry in dead}:
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process was first
            rename_new(restored, path)
    for entry in sorted(dead, key=lambda entry: entry.kind is Kind.LEASE):
        if entry.path != own.path:
            with contextlib.suppress(OSError):
                remove(entry.path)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
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
    """Rename a file or a directory to a path that does not exist.

    Raises:
        FileExistsError: The path exists.
        OSError: Renaming failed.
    """
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
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_HERE, os.fsencode(source), _HERE, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _REFUSED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


def _siblings(path: Path) -> Iterator[_Sibling]:
    pattern = re.compile(re.escape(f".{_stem(path)}.") + rf"([0-9a-f-]+)\.({'|'.join(Kind)})")
    if not path.parent.is_dir():
        return
    for name in sorted(os.listdir(path.parent)):
        if match := pattern.fullmatch(name):
            yield _Sibling(path.with_name(name), match[1], Kind(match[2]))


def _is_whole(path: Path) -> bool:
    if not path.is_dir():
        return True
    try:
        check_manifest(path, checksums=False)
    except (CheckpointError, OSError):
        return False
    return True


def _finished(path: Path) -> float:
    """Return when something was written: the time of its newest file."""
    try:
        entries = [*path.iterdir()] if path.is_dir() else []
        return max(entry.stat().st_mtime for entry in (entries or [path]))
    except OSError:
        return 0.0


def _stem(path: Path) -> str:
    # The sibling of a long name must not be too long itself: file systems take 255 bytes.
    name = os.fsencode(path.name)
    if len(name) <= _LONGEST:
        return path.name
    return f"{os.fsdecode(name[: _LONGEST - 8]).encode('utf-8', 'ignore').decode()}{zlib.crc32(name):08x}"
