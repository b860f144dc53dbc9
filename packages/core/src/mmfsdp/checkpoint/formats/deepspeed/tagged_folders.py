"""Finds the directory of a DeepSpeed checkpoint, which may be the one that the file ``latest`` names."""

from __future__ import annotations

from pathlib import Path

from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.integrity import inside, refuse_special
from mmfsdp.errors import CheckpointNotFoundError, FormatError

__all__ = ["STATES", "folder_of"]

STATES = ("_model_states.pt", "_optim_states.pt", "-model_states.pt")
"""The suffixes of DeepSpeed's files."""

_LATEST = ("latest", "latest_universal")


def folder_of(path: Path, names: list[str]) -> Path:
    """Return the directory that holds the files: this one, or the one that its file ``latest`` names.

    Raises:
        CheckpointNotFoundError: The directory that it names does not exist, or has no files of DeepSpeed.
        FormatError: It names a directory somewhere else.
    """
    if any(name.endswith(STATES) for name in names):
        return path
    found = next((name for name in _LATEST if name in names), None)
    tags = [name for name in names if (path / name).is_dir() and _holds_states(path / name)]
    has = f"It has {name_list(tags)}." if tags else "It has none."
    if found is None:
        raise CheckpointNotFoundError(
            f"{path.name} has no file 'latest' that names a checkpoint of DeepSpeed. {has}", file=str(path)
        )
    latest = inside(path, found, path)
    refuse_special(latest, directory=False)
    with latest.open("rb") as file:
        tag = file.read(4096).decode(errors="replace").strip()
    folder = _named_folder(path, tag, latest)
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"{path.name}/{found} names the checkpoint {tag!r}, which is not there. {has}", file=str(latest)
        )
    if not _holds_states(folder):
        raise CheckpointNotFoundError(
            f"{path.name}/{found} names {tag!r}, which holds no files of DeepSpeed. {has}", file=str(folder)
        )
    return folder


def _named_folder(path: Path, name: str, origin: Path) -> Path:
    """Return a folder that a file names, which must be directly within this one."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise FormatError(f"{origin.name} names the directory {name!r}, which is no name.", file=str(origin))
    return path / name


def _holds_states(folder: Path) -> bool:
    return any(entry.name.endswith(STATES) for entry in folder.iterdir())
