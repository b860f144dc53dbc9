"""Finds the entries of the save and of one file in ``manifest.json``, without reading the entries of other files.

A rank of thousands needs the checksums of the few files that it reads; all checksums take 32 MB for each terabyte.
A manifest that was formatted anew, or that lies on a server, is read whole.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.integrity import parse_json
from mmfsdp.checkpoint.manifest import (
    BLOCK,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    file_entry,
    parsed_manifest,
    read_manifest,
    wrong_size,
)

__all__ = ["check_size", "find_entry", "find_save", "have_blocks"]

_MARK = b'\n  "'  # begins the entry of a file in what `manifest_bytes` returns, and nothing else
_WINDOW = 8 << 10  # bytes that are read at once
_MOST = 1 << 20
_HEAD = 1024  # bytes that hold what is said before the files


def find_entry(directory: Path, name: str) -> FileEntry | None:
    """Return the entry of one file of a checkpoint directory; ``None`` if the manifest does not list it.

    Files are listed by name, so a few short reads are enough, however many there are.

    Args:
        directory: The checkpoint directory, which has a manifest.
        name: The file's name.

    Raises:
        CheckpointError: See `mmfsdp.checkpoint.manifest.read_manifest`.
    """
    found = None if is_remote(directory) else _searched(directory / MANIFEST_NAME, name)
    return read_manifest(directory).files.get(name) if found is None else found


def find_save(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint directory, without its files.

    Raises:
        CheckpointError: See `mmfsdp.checkpoint.manifest.read_manifest`.
    """
    if not is_remote(directory):
        with suppress(OSError, ValueError), (directory / MANIFEST_NAME).open("rb") as file:
            head, found, _ = file.read(_HEAD).partition(b',\n "files": {')
            if found:
                return parsed_manifest(directory / MANIFEST_NAME, parse_json(f'{head.decode()}, "files": {{}}}}'))
    whole = read_manifest(directory)
    return Manifest(whole.save_id, whole.world_size, {})


def have_blocks(directory: Path) -> bool:
    """Return whether the manifest of a directory holds checksums of the blocks of every file.

    Raises:
        CheckpointError: See `mmfsdp.checkpoint.manifest.read_manifest`.
    """
    if not is_remote(directory):
        with suppress(OSError):
            data = (directory / MANIFEST_NAME).read_bytes()
            files = data.count(b'\n   "size": ')
            if _has_blocks(data[:_HEAD]) and 0 < files == data.count(_MARK) == data.count(b'\n   "crc32_blocks": "'):
                return True
    files_of = read_manifest(directory).files
    return bool(files_of) and all(entry.blocks is not None for entry in files_of.values())


def check_size(directory: Path, name: str, size: int) -> None:
    """Compare the length of a file with what the manifest says, if it lists the file.

    Args:
        directory: The checkpoint directory, which has a manifest.
        name: The file's name.
        size: Its length in bytes.

    Raises:
        CorruptCheckpointError: It differs.
    """
    expected = find_entry(directory, name)
    if expected is not None and expected.size != size:
        raise wrong_size(directory / name, size, expected.size)


def _has_blocks(head: bytes) -> bool:
    return b'"block_size": %d,' % BLOCK in head.partition(_MARK)[0]


def _searched(path: Path, name: str) -> FileEntry | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # reading it whole says what is wrong
    try:
        low, high = 0, os.fstat(file).st_size
        if not _has_blocks(os.pread(file, _HEAD, 0)):
            return None
        while high - low > _WINDOW:
            middle = (low + high) // 2
            at, found = _next(file, middle, high)
            if at >= high or found > name:
                high = middle
            else:
                low = at
        data = os.pread(file, high - low + len(name) + 64, low)
        begin = data.find(_MARK + name.encode() + b'": {')
        if begin < 0:
            return None
        begin += low + len(_MARK) + len(name.encode()) + 3
        data = b""
        while b"}" not in data and (more := os.pread(file, max(_WINDOW, len(data)), begin + len(data))):
            data += more
        return file_entry(name, json.loads(data[: data.index(b"}") + 1]), block_size=BLOCK)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    finally:
        os.close(file)


def _next(file: int, begin: int, end: int) -> tuple[int, str]:
    """Return where the first entry from a byte on begins, and its name; ``end`` and no name if there is none."""
    at, window = begin, _WINDOW
    while at < end:
        data = os.pread(file, window, at)
        found = data.find(_MARK)
        if found >= 0 and at + found < end:
            name = os.pread(file, 1024, at + found + len(_MARK)).partition(b'"')[0]
            return at + found, name.decode()
        at += max(len(data) - len(_MARK) + 1, 1)  # a mark may begin in one window and end in the next
        window = min(window * 4, _MOST)  # the checksums of a large file
    return end, ""
