"""Writes pages of HTML, which may replace another page but never a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from mmfsdp.checkpoint.files.atomic import TargetExistsError, atomic_output
from mmfsdp.checkpoint.files.disk import refuse_missing_parent, write_errors

__all__ = ["check_page_path", "write_page"]


def write_page(page: str, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a page to a file, which appears complete or not at all.

    Args:
        page: Its text, such as `diff_page` returns.
        path: The file.
        overwrite: Replace it if it exists and is a page.

    Raises:
        TargetExistsError: The file exists, and ``overwrite`` is false, or it is not a page, but a checkpoint, say.
        CheckpointError: It cannot be written.
    """
    target = Path(path)
    refuse_missing_parent(target)
    check_page_path(target)
    with write_errors(target), atomic_output(target, overwrite=overwrite) as temporary:
        temporary.write_text(page, encoding="utf-8")


def check_page_path(path: str | os.PathLike[str]) -> None:
    """Check, before the work that a page shows, that it would replace nothing but another page.

    Args:
        path: The file to write.

    Raises:
        TargetExistsError: There is something else, such as a checkpoint.
        CheckpointError: What is there cannot be read.
    """
    target = Path(path)
    with write_errors(target):
        is_page = target.is_file() and _begins_as_page(target)
    if target.exists() and not is_page:
        kind = "directory" if target.is_dir() else "file"
        raise TargetExistsError(
            f"{str(target)!r} is a {kind}, and only another page would be replaced. Choose another path.",
            file=str(target),
        )


def _begins_as_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(1) in (b"", b"<")
