"""Recognises what a failed download leaves in place of a file: a pointer of git-lfs, a web page, zeros."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.text import human_bytes, name_list
from mmfsdp.checkpoint.damage import not_permitted
from mmfsdp.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    MmfsdpError,
)

__all__ = ["explained", "pointer_notes", "stand_in"]

_READ = 4096  # bytes; a pointer has up to 1024
_POINTER = re.compile(rb"version https?://(git-lfs\.github\.com|hawser\.github\.com)/spec/")
_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)*<(!doctype html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_XML = re.compile(rb"(\xef\xbb\xbf)?\s*<(\?xml|error)\b", re.IGNORECASE)
_TITLE = re.compile(rb"<(title|message)[^>]*>\s*([^<]+?)\s*</", re.IGNORECASE)
_WEIGHTS = (".pth", ".pt", ".th", ".bin", ".ckpt", ".safetensors", ".gguf", ".distcp")
_LEAST = 16  # zeros that no format begins with
_ANSWER = 300  # bytes; a longer text is not the answer of a server that has no such file


def explained(error: CheckpointError) -> CheckpointError:
    """Return an error that says what is in place of the file that an error is about; the error itself otherwise."""
    file = str(error.context.get("file", ""))
    return (stand_in(Path(file)) if file else None) or error


def stand_in(file: Path) -> CheckpointError | None:
    """Return the error for a path that holds something else than its file; ``None`` if it may hold the right one.

    Args:
        file: A file, which need not exist.
    """
    try:
        file.stat()
    except PermissionError as error:  # newer releases of Python say that it does not exist
        return not_permitted(file, error)
    except (OSError, ValueError):
        return None
    head = _head(file)
    if _POINTER.match(head):
        size = _SIZE.search(head)
        what = f"its {human_bytes(int(size[1]))} were" if size else "its content was"
        return IncompleteCheckpointError(
            f"{file.name} is a pointer of git-lfs and not the file itself: {what} not downloaded. Run `git lfs pull` "
            "in its repository, or download the file by itself.",
            file=str(file),
        )
    if len(head) >= _LEAST and not any(head):
        return CorruptCheckpointError(
            f"{file.name} begins with zeros only, as a file whose download or copy was interrupted. Get it again.",
            file=str(file),
        )
    answer = _answer(head, file.name)
    if answer is None:
        return None
    return FormatError(
        f"{file.name} is {answer}, and not a checkpoint. Download the file again, and check its address.",
        file=str(file),
    )


def pointer_notes(files: Mapping[str, Path]) -> list[str]:
    """Return a note of files on this machine that are copied and are pointers of git-lfs, such as a tokenizer.json.

    Args:
        files: The files by name.
    """
    found = [name for name, file in files.items() if not is_remote(file) and _POINTER.match(_head(file))]
    if not found:
        return []
    folder = str(files[found[0]].parent)
    are = "is a pointer" if len(found) == 1 else "are pointers"
    return [f"{name_list(found, 3)} in {folder!r} {are} of git-lfs and copied as such: run `git lfs pull` there"]


def _head(file: Path) -> bytes:
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as opened:
            return opened.read(_READ)
    except (OSError, MmfsdpError):  # what cannot be read is reported by who reads it
        return b""


def _answer(head: bytes, name: str) -> str | None:
    title = _TITLE.search(head)
    said = f" ({title[2].decode(errors='replace')[:80]!r})" if title else ""
    if _PAGE.match(head):
        return f"a web page{said}"
    if _XML.match(head):
        return f"a server's answer in XML{said}"
    if len(head) > _ANSWER or not name.endswith(_WEIGHTS):
        return None
    try:
        text = head.decode("ascii").strip()
    except UnicodeDecodeError:
        return None
    if text.startswith("{"):
        return f"a server's answer, {text!r}" if _is_refusal(text) else None
    return f"a short text, {text!r}" if text and text.isprintable() else None


def _is_refusal(text: str) -> bool:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and not {"error", "message", "detail"}.isdisjoint(content)
