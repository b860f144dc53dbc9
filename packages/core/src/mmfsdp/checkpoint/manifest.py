"""``manifest.json``: which files make up a checkpoint directory, how large they are and what they hash to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError

__all__ = ["MANIFEST_NAME", "FileEntry", "Manifest", "check_manifest", "hash_file", "read_manifest", "write_manifest"]

MANIFEST_NAME = "manifest.json"
"""Its file name in the directory."""

_FORMAT = "mmfsdp.manifest"
_BLOCK = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint directory."""

    size: int
    """Length in bytes."""
    xxh3_64: str | None
    """XXH3 hash of 64 bits as 16 hexadecimal digits; ``None`` if none was taken."""

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Return the entry of a file, reading all of it."""
        return cls(path.stat().st_size, hash_file(path))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``manifest.json`` says."""

    save_id: str
    """Identifies one save; every file of it carries the same."""
    world_size: int
    """Number of ranks that took part."""
    files: Mapping[str, FileEntry]
    """File name, relative to the directory, to its size and hash."""


def write_manifest(
    directory: Path, *, save_id: str, world_size: int, files: Mapping[str, FileEntry] | None = None
) -> Manifest:
    """Write ``manifest.json`` into a directory and return what it says.

    Args:
        directory: The checkpoint directory.
        save_id: Identifies the save.
        world_size: Number of ranks that took part.
        files: The files, if their sizes and hashes are known already, as when each rank has hashed its own. By default
            every file of the directory is hashed here.
    """
    if files is None:
        present = sorted(path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST_NAME)
        files = {path.name: FileEntry.of(path) for path in present}
    content = {
        "format": _FORMAT,
        "version": 1,
        "save_id": save_id,
        "world_size": world_size,
        "files": {name: {"size": entry.size, "xxh3_64": entry.xxh3_64} for name, entry in sorted(files.items())},
    }
    (directory / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return Manifest(save_id, world_size, dict(files))


def read_manifest(directory: Path) -> Manifest:
    """Read ``manifest.json`` of a directory.

    Raises:
        IncompleteCheckpointError: There is none.
        FormatError: It is of another kind or a newer version.
        CorruptCheckpointError: It is damaged.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(f"{directory.name} has no {MANIFEST_NAME}.", file=str(path)) from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{MANIFEST_NAME} is damaged: {error}.", file=str(path)) from error
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


def check_manifest(directory: Path, *, hashes: bool = True) -> Manifest:
    """Compare the files of a directory with its manifest, and return it.

    Args:
        directory: The checkpoint directory.
        hashes: Also hash every file, which reads all of it; otherwise only sizes are compared.

    Raises:
        IncompleteCheckpointError: A file of the manifest is missing, or the manifest itself.
        CorruptCheckpointError: A size or hash differs.
    """
    manifest = read_manifest(directory)
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise IncompleteCheckpointError(f"{name} is missing, which {MANIFEST_NAME} lists.", file=str(path))
        size = path.stat().st_size
        if size != expected.size:
            raise CorruptCheckpointError(
                f"{name} has {size} bytes (expected {expected.size} by {MANIFEST_NAME}).", file=str(path)
            )
        if hashes and expected.xxh3_64 is not None:
            found = hash_file(path)
            if found != expected.xxh3_64:
                raise CorruptCheckpointError(
                    f"{name} is damaged: its XXH3 hash is {found} (expected {expected.xxh3_64} by {MANIFEST_NAME}).",
                    file=str(path),
                )
    return manifest


def hash_file(path: Path) -> str:
    """Return the XXH3 hash of 64 bits of a file as 16 hexadecimal digits, reading it in blocks."""
    import xxhash

    state = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()


def _parsed(content: dict[str, Any]) -> Manifest:
    files = {}
    for name, entry in content["files"].items():
        size, digest = entry["size"], entry.get("xxh3_64")
        if type(size) is not int or not isinstance(digest, str | None) or Path(name).name != name:
            raise ValueError(f"the entry of {name!r} is malformed")
        files[name] = FileEntry(size, digest)
    if not isinstance(content["save_id"], str) or type(content["world_size"]) is not int:
        raise ValueError("'save_id' or 'world_size' is malformed")
    return Manifest(content["save_id"], content["world_size"], files)
