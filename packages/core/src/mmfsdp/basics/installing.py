"""Says how to install the packages and their extras: from a package index, or from where this copy came from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["FOLDERS", "ON_INDEX", "REPOSITORY", "pip_install", "requirement"]

ON_INDEX = False
"""Whether the three packages are on a package index. Set it to True with the first release there; a test then
asks for the short lines in docs."""

REPOSITORY = "URL"
"""The address to clone. Until the repository has a public one, this is a placeholder, and pages say so. When it is set,
``python tools/address.py`` writes it into metadata, the citation and forms."""

FOLDERS = {"mmfsdp": "packages/core", "mmfsdp-mmengine": "packages/mmengine_adapter", "mmfsdp-cli": "packages/cli"}


def pip_install(*requirements: str, upgrade: bool = False) -> str:
    """Return a command that installs requirements, among them packages of this repository with or without extras.

    Args:
        requirements: Such as ``'mmfsdp[torch]'`` and ``'s3fs'``.
        upgrade: Whether the command replaces what is installed.
    """
    origin = None if ON_INDEX else _origin()
    found = [item if ON_INDEX else requirement(item, origin) for item in requirements]
    return f"pip install {'--upgrade ' * upgrade}{' '.join(map(shlex.quote, found))}"


def requirement(text: str, origin: Mapping[str, Any] | None) -> str:
    """Return a requirement as pip finds it without an index.

    Args:
        text: A distribution, with or without an extra. Distributions of others stay as they are.
        origin: What ``direct_url.json`` says of the installed `mmfsdp`; None if there is none. See
            https://packaging.python.org/en/latest/specifications/direct-url/
    """
    name, bracket, extra = text.partition("[")
    if name not in FOLDERS:
        return text
    address, version = REPOSITORY, ""
    if origin is not None and "vcs_info" in origin:
        address, version = origin["url"], f"@{origin['vcs_info']['commit_id']}"
    elif origin is not None and "dir_info" in origin:
        core = Path(unquote(urlsplit(origin["url"]).path))
        return f"{core.parents[1] / FOLDERS[name]}{bracket}{extra}"
    return f"{text} @ git+{address}{version}#subdirectory={FOLDERS[name]}"


def _origin() -> Mapping[str, Any] | None:
    from importlib.metadata import PackageNotFoundError, distribution  # takes a twentieth of a command's start

    try:
        text = distribution("mmfsdp").read_text("direct_url.json")
    except PackageNotFoundError:  # on the path, and not installed
        return None
    found: Mapping[str, Any] | None = json.loads(text) if text else None
    return found
