"""Knows which releases of torch are supported, and says what to install if there is none or an older one."""

from __future__ import annotations

import functools
import re

from mmfsdp.basics.installing import pip_install
from mmfsdp.errors import MissingTorchImportError

__all__ = ["MINIMUM_TORCH", "NEWEST_TESTED_TORCH", "installed_release", "require_torch", "untested"]

MINIMUM_TORCH = (2, 9)
"""Oldest release, (major, minor), that the extra ``mmfsdp[torch]`` accepts."""

NEWEST_TESTED_TORCH = (2, 15)
"""Newest release, (major, minor), that ``nox -s compat`` tests; docs/reference/compatibility.md has the results."""


def require_torch(what: str) -> None:
    """Import torch, and raise unless it is there and new enough. Not collective.

    Args:
        what: What needs torch, as the error names it: ``'mmfsdp.sharding'``.

    Raises:
        MissingTorchImportError: torch is not installed or is older than `MINIMUM_TORCH`.
    """
    least = ".".join(map(str, MINIMUM_TORCH))
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingTorchImportError(
            f"{what} needs torch {least} or newer, which is not installed. Install it with: "
            f"{pip_install('mmfsdp[torch]')}"
        ) from None
    if installed_release() < MINIMUM_TORCH:
        raise MissingTorchImportError(
            f"{what} needs torch {least} or newer, and torch {torch.__version__} is installed. Upgrade it with: "
            f"{pip_install('mmfsdp[torch]', upgrade=True)}"
        )


@functools.cache
def installed_release() -> tuple[int, int]:
    """Return (major, minor) of the installed torch. Not collective.

    A build whose version has no number counts as newer than all that were tested.
    """
    import torch

    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else (NEWEST_TESTED_TORCH[0], NEWEST_TESTED_TORCH[1] + 1)


def untested() -> str | None:
    """Return one sentence for a plan's notes if the installed torch is newer than what was tested. Not collective."""
    import torch

    if installed_release() <= NEWEST_TESTED_TORCH:
        return None
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    return f"torch {torch.__version__} is newer than {newest}, the newest release that mmfsdp was tested with."
