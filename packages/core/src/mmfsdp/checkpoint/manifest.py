"""Reads, writes and checks ``manifest.json``: the files of a checkpoint directory, their sizes and checksums."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.checkpoint.integrity import crc32, crc32_combine, inside, parse_json
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = [
    "BLOCK",
    "MANIFEST_NAME",
    "BlockSums",
    "FileEntry",
    "Manifest",
    "check_manifest",
    "file_entry",
    "manifest_bytes",
    "parsed_manifest",
    "read_manifest",
    "write_manifest",
    "wrong_size",
]

MANIFEST_NAME = "manifest.json"
"""Its file name in the directory."""

BLOCK = 1 << 18
"""Bytes of a block: files have a checksum for each block beside the one of the whole."""

_FORMAT = "mmfsdp.manifest"
_LIMIT = 200_000_000  # bytes
_NO_NAMES = ("", ".", "..")
_CRC = re.compile("[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint directory."""

    size: int
    """Length in bytes."""
    crc32: int | None
    """CRC-32 of the whole file; ``None`` if it was not computed."""
    blocks: Sequence[int] | None = None
    """CRC-32 of each block of the file, the last one shorter, to check parts of the file: an array, as 1 TB has four
    million blocks."""

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Return the entry of a file, reading all of it."""
        sums = BlockSums()
        with path.open("rb", buffering=0) as file:
            while data := file.read(BLOCK):
                sums.add(data)
        return sums.entry()


class BlockSums:
    """Computes the checksums of a file while its bytes are written in order."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._last, self._held = 0, 0

    def add(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: BLOCK - self._held]
            self._append(crc32(part, self._last), len(part))
            view = view[len(part) :]

    def add_sum(self, crc: int, length: int) -> None:
        """Add the CRC-32 of the next bytes, which do not leave their block."""
        self._append(crc32_combine(self._last, crc, length), length)

    @property
    def size(self) -> int:
        """How many bytes there were."""
        return len(self._blocks) * BLOCK + self._held

    def _append(self, last: int, length: int) -> None:
        self._last, self._held = last, self._held + length
        if self._held == BLOCK:
            self._blocks.append(last)
            self._last, self._held = 0, 0

    def entry(self) -> FileEntry:
        """Return size and checksums of all bytes so far."""
        blocks = [*self._blocks, *([self._last] if self._held else [])]
        whole = 0
        for index, value in enumerate(blocks):
            whole = crc32_combine(whole, value, BLOCK if index < len(self._blocks) else self._held)
        return FileEntry(self.size, whole, array("I", blocks))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifest.json``."""

    save_id: str
    """Identifies one save; every file of it carries the same."""
    world_size: int
    """Number of ranks that saved it."""
    files: Mapping[str, FileEntry]
    """File name, relative to the directory, to its size and checksum."""


def write_manifest(
    directory: Path, *, save_id: str, world_size: int, files: Mapping[str, FileEntry] | None = None
) -> Manifest:
    """Write ``manifest.json`` into a directory and return its content.

    Args:
        directory: The checkpoint directory.
        save_id: Identifies the save.
        world_size: Number of ranks that took part.
        files: Sizes and checksums of the files, if they are known, for example because each rank has read its own. By
            default every file of the directory is read.
    """
    if files is None:
        present = sorted(path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST_NAME)
        files = {path.name: FileEntry.of(path) for path in present}
    (directory / MANIFEST_NAME).write_bytes(manifest_bytes(save_id=save_id, world_size=world_size, files=files))
    return Manifest(save_id, world_size, dict(files))


def manifest_bytes(*, save_id: str, world_size: int, files: Mapping[str, FileEntry]) -> bytes:
    """Return the content of a ``manifest.json``; for the arguments, see `write_manifest`."""
    content = {
        "format": _FORMAT,
        "version": 1,
        "save_id": save_id,
        "world_size": world_size,
        "block_size": BLOCK,
        "files": {name: _described(entry) for name, entry in sorted(files.items())},
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    """Read ``manifest.json`` of a directory.

    Raises:
        IncompleteCheckpointError: The directory has no manifest.
        FormatError: It is not a manifest of mmfsdp, has a newer version, or is not a file of the directory.
        CorruptCheckpointError: It is damaged.
    """
    path = directory / MANIFEST_NAME
    inside(directory, MANIFEST_NAME, directory)
    try:
        if path.exists() and path.stat().st_size > _LIMIT:
            raise ValueError("it is too large")
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(f"{directory.name} has no {MANIFEST_NAME}.", file=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{MANIFEST_NAME} is damaged: {error}.", file=str(path)) from error
    return parsed_manifest(path, content)


def parsed_manifest(path: Path, content: Any) -> Manifest:
    """Return a manifest from what its JSON holds.

    Args:
        path: The file, for messages.
        content: What it holds.

    Raises:
        FormatError, CorruptCheckpointError: See `read_manifest`.
    """
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise FormatError(f"{MANIFEST_NAME} is not a manifest of mmfsdp.", file=str(path))
    if content.get("version") != 1:
        raise FormatError(
            f"{MANIFEST_NAME} has version {content.get('version')!r}; this mmfsdp reads version 1. Install a newer "
            "mmfsdp.",
            file=str(path),
        )
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"{MANIFEST_NAME} is damaged: {error!r}.", file=str(path)) from error


def check_manifest(directory: Path, *, manifest: Manifest | None = None) -> Manifest:
    """Compare names and sizes of a directory's files with its manifest, and return it; no data is read.

    Args:
        directory: The checkpoint directory.
        manifest: The manifest, if it has been read.

    Raises:
        IncompleteCheckpointError: A file of the manifest is missing, or the manifest itself.
        CorruptCheckpointError: A size differs.
    """
    manifest = manifest or read_manifest(directory)
    for name, expected in manifest.files.items():
        size = _size(directory, name)
        if size is None:
            raise IncompleteCheckpointError(
                f"{name} is missing, which {MANIFEST_NAME} lists.", file=str(directory / name)
            )
        if size != expected.size:
            raise wrong_size(directory / name, size, expected.size)
    return manifest


def wrong_size(path: Path, found: int, expected: int) -> CorruptCheckpointError:
    """Return the error for a file that has another length in bytes than the manifest says."""
    return CorruptCheckpointError(
        f"{path.name} has {found} bytes (expected {expected} by {MANIFEST_NAME}): it is damaged, or of another save.",
        file=str(path),
    )


def _size(directory: Path, name: str) -> int | None:
    """Return the length of a file in bytes; ``None`` if there is none. A directory may hold thousands."""
    if is_remote(directory):
        path = directory / name
        return path.stat().st_size if path.is_file() else None
    try:
        state = os.stat(f"{directory}/{name}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return state.st_size if stat.S_ISREG(state.st_mode) else None


def file_entry(name: str, described: Mapping[str, Any], *, block_size: Any) -> FileEntry:
    """Return the entry of a file from what a manifest says of it.

    Args:
        name: The file's name.
        described: What the manifest says.
        block_size: The size of blocks that the manifest names.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is malformed.
    """
    size, crc = described["size"], described.get("crc32")
    if type(size) is not int or size < 0 or not _is_crc(crc) or "/" in name or "\0" in name or name in _NO_NAMES:
        raise ValueError(f"the entry of {name!r} is malformed")
    blocks = _blocks(described.get("crc32_blocks"), size) if block_size == BLOCK else None
    return FileEntry(size, None if crc is None else int(crc, 16), blocks)


def damaged_file(path: Path, found: int | None, expected: int) -> str:
    """Return the message for a file that has another checksum than the manifest says."""
    shown = "unknown" if found is None else f"{found:08x}"
    return (
        f"{path.name} is damaged, or of another save: its CRC-32 is {shown} (expected {expected:08x} by "
        f"{MANIFEST_NAME})."
    )


def _described(entry: FileEntry) -> dict[str, Any]:
    described: dict[str, Any] = {"size": entry.size, "crc32": None if entry.crc32 is None else f"{entry.crc32:08x}"}
    if entry.blocks is not None:
        described["crc32_blocks"] = struct.pack(f">{len(entry.blocks)}I", *entry.blocks).hex()
    return described


def _parsed(content: dict[str, Any]) -> Manifest:
    block_size = content.get("block_size")
    files = {name: file_entry(name, entry, block_size=block_size) for name, entry in content["files"].items()}
    if not isinstance(content["save_id"], str) or type(content["world_size"]) is not int:
        raise ValueError("'save_id' or 'world_size' is malformed")
    return Manifest(content["save_id"], content["world_size"], files)


def _blocks(given: Any, size: int) -> Sequence[int] | None:
    if given is None:
        return None
    count = -(-size // BLOCK)
    if not isinstance(given, str) or len(given) != 8 * count:
        raise ValueError("'crc32_blocks' is malformed")
    blocks = array("I", bytes.fromhex(given))
    if sys.byteorder == "little":
        blocks.byteswap()
    return blocks


def _is_crc(value: Any) -> bool:
    return value is None or (isinstance(value, str) and _CRC.fullmatch(value) is not None)
