"""Writes pages of HTML: those of ``mmfsdp-cli rehearse --html``, and of ``diff`` as far as the file is concerned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mmfsdp_cli.printing.console import reporting_errors

if TYPE_CHECKING:
    from mmfsdp.rehearsal import Rehearsal

__all__ = ["free_target", "write_report"]


def free_target(path: Path, *, overwrite: bool) -> None:
    """Reject a path that cannot be written, before the work that the page shows.

    Raises:
        BadParameter: The file exists and is not to be replaced, or is a directory, or its directory is missing.
        Exit: The file exists and is not a page.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK) and os.path.lexists(path.parent):
        raise click.BadParameter(f"{str(path.parent)!r} may not be written to by this user.", param_hint="--html")
    if not path.parent.is_dir():
        raise click.BadParameter(f"the directory {str(path.parent)!r} does not exist.", param_hint="--html")
    if path.is_dir():
        example = str(path / "report.html")
        raise click.BadParameter(
            f"{str(path)!r} is a directory. Give a file, such as {example!r}.", param_hint="--html"
        )
    if path.exists() and not overwrite:
        raise click.BadParameter(f"{str(path)!r} exists already. Add --force to replace it.", param_hint="--html")
    if path.exists():
        with reporting_errors():
            from mmfsdp.checkpoint import check_page_path

            check_page_path(path)


def write_report(steps: Sequence[Rehearsal], names: Sequence[str], path: Path, *, overwrite: bool) -> None:
    """Write a page about one rehearsal or several, complete or not at all."""
    from mmfsdp.checkpoint import write_page
    from mmfsdp.rehearsal import report

    write_page(report(*steps, names=names), path, overwrite=overwrite)
