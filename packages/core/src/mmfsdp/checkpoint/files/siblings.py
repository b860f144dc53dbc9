"""The hidden files and directories beside a target while it is written, and what a killed process leaves of them.

For a target ``a`` they are ``.a.TOKEN.mmfsdp-partial``, what is written; ``.a.TOKEN.mmfsdp-replaced``, what was there
before, where a directory cannot be exchanged in one step; ``.a.TOKEN.mmfsdp-lease``, which the process that writes
keeps locked; ``.a.mmfsdp-claim``, which one process keeps locked that relies on finding nothing at the target; and
``.a.TOKEN.mmfsdp-removed``, an old checkpoint that is about to go.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mmfsdp.checkpoint.files.exchanging import rename_new
from mmfsdp.checkpoint.files.leases import Lease, is_alive
from mmfsdp.checkpoint.manifest import check_manifest
from mmfsdp.errors import CheckpointError

__all__ = [
    "Kind",
    "claim_of",
    "interrupted",
    "new_token",
    "remove",
    "remove_leftovers",
    "sibling",
    "targets_of",
    "token_of",
]

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
    """Return what tells one writing of a target from any other."""
    return secrets.token_hex(8)


def sibling(path: Path, token: str, kind: Kind) -> Path:
    """Return the path of a sibling of a target."""
    return path.with_name(f".{_stem(path)}.{token}.{kind}")


def claim_of(path: Path) -> Path:
    """Return the path of the claim of a target."""
    return path.with_name(f".{_stem(path)}.mmfsdp-claim")


def token_of(temporary: Path) -> str:
    """Return the token in the name of a sibling; a fresh one if it is not a name of ours."""
    parts = temporary.name.split(".")
    return parts[-2] if parts[-1] in tuple(Kind) and len(parts) > 2 else new_token()


def interrupted(path: Path) -> Path | None:
    """Return the newest complete checkpoint that an interrupted replacement left beside a target that is missing.

    ``None`` if there is something at the target, or nothing to put there.

    Args:
        path: The target.
    """
    if os.path.lexists(path) or path.name in ("", ".."):
        return None
    found = list(_siblings(path))
    moved = {entry.token for entry in found if entry.kind is Kind.REPLACED}
    # What was to take the place of something that was moved aside had been finished.
    whole = [
        entry.path
        for entry in found
        if entry.kind is Kind.REPLACED
        or (entry.kind is Kind.PARTIAL and entry.token in moved and _is_whole(entry.path))
    ]
    return max(whole, key=_finished, default=None)


def targets_of(directory: Path) -> set[str]:
    """Return the names of the targets in a directory of which an interrupted replacement left something beside them."""
    pattern = re.compile(rf"\.(.+)\.[0-9a-f-]+\.{Kind.REPLACED}")
    names = {match[1] for name in os.listdir(directory) if (match := pattern.fullmatch(name))}
    return {name for name in names if interrupted(directory / name) is not None}


def remove_leftovers(path: Path, own: Lease) -> None:
    """Remove what dead processes left beside a target; if one died while it replaced the target, restore that.

    What another process may still be writing stays; so does what cannot be removed.

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
    """Remove a file or a directory; one that does not exist is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
