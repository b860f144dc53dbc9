"""Checks that torch is installed and new enough, and otherwise says which command installs it."""

from __future__ import annotations

import re

from mmfsdp.errors import MissingTorchError

__all__ = ["MINIMUM_TORCH", "require_torch"]

MINIMUM_TORCH = (2, 6)
"""Oldest version (major, minor) that the extra ``mmfsdp[torch]`` accepts."""


def require_torch(what: str) -> None:
    """Import torch, and raise unless it is there and new enough. Not collective.

    Args:
        what: What needs torch, as the error names it: ``'mmfsdp.sharding'``.

    Raises:
        MissingTorchError: torch is not installed or is older than `MINIMUM_TORCH`.
    """
    least = ".".join(map(str, MINIMUM_TORCH))
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingTorchError(
            f"{what} needs torch {least} or newer, which is not installed. Install it with: pip install 'mmfsdp[torch]'"
        ) from None
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if found and (int(found[1]), int(found[2])) < MINIMUM_TORCH:
        raise MissingTorchError(
            f"{what} needs torch {least} or newer, and torch {torch.__version__} is installed. Upgrade it with: "
            "pip install --upgrade 'mmfsdp[torch]'"
        )
