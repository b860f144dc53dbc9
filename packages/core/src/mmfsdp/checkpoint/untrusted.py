"""Reads JSON, file names and paths that come from a checkpoint, and rejects those that could mislead a reader."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from mmfsdp.errors import FormatError

__all__ = ["inside", "parse_json", "refuse_special"]


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text. An object with the same key twice, NaN and infinity are errors.

    Raises:
        ValueError: The text is not JSON, or two readers could understand it differently.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)


def inside(directory: Path, name: str, origin: Path) -> Path:
    """Return the path of a file that must lie in a directory, following links. The file need not exist.

    Args:
        directory: Where the file must be.
        name: Its path relative to the directory, as some file gives it.
        origin: That file, for messages.

    Raises:
        FormatError: The name leads out of the directory (other than to the blobs of Hugging Face's cache), or is not
            the name of a file.
    """
    path = directory / name
    parts = Path(name).parts
    if "\0" in name or not parts or Path(name).is_absolute() or ".." in parts:
        raise FormatError(f"{origin.name} names the file {name!r}, which is not in its directory.", file=str(origin))
    try:
        target, home = path.resolve(), directory.resolve()
        leads_out = not any(target.is_relative_to(root) for root in (home, *_blobs(home)))
    except (OSError, RuntimeError) as error:  # links in a circle
        raise FormatError(f"{origin.name} names the file {name!r}: {error}.", file=str(origin)) from error
    if leads_out:
        raise FormatError(
            f"{origin.name} names the file {name!r}, which is a link out of its directory.", file=str(path)
        )
    refuse_special(path, directory=False)
    return path


def refuse_special(path: Path, *, directory: bool = True) -> None:
    """Raise ``FormatError`` for a path that is neither a file nor a directory, such as a pipe: opening it can block.

    Args:
        path: The path that will be opened; it need not exist.
        directory: Whether it may be a directory.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # the caller reports it when it opens the path
        return
    if not stat.S_ISREG(mode) and not (directory and stat.S_ISDIR(mode)):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise FormatError(f"{path.name} is {kind}, and not a file.", file=str(path))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {next(name for name in counts if counts[name] > 1)!r} appears twice")
    return content


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _blobs(directory: Path) -> list[Path]:
    """Return where the files of a snapshot in Hugging Face's cache lie, which are links.

    https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    repository = directory.parent.parent
    of_a_cache = directory.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--"))
    return [repository / "blobs"] if of_a_cache else []
