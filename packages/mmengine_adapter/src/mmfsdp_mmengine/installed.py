"""Checks which distribution of MMEngine is installed: there are three, which share the import name ``mmengine``."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from mmfsdp.basics import pip_install
from mmfsdp.errors import MmfsdpError

__all__ = ["DISTRIBUTIONS", "MINIMUM_MMENGINE", "MissingMMEngineError", "check_mmengine", "problem_of"]

DISTRIBUTIONS = {"mmengine": "mmengine", "mmengine-lite": "lite", "onedl-mmengine": "onedl"}
"""The distributions that bring the module ``mmengine``, each with the extra of this package that installs it."""
MINIMUM_MMENGINE = (0, 10)
"""The oldest release that this package supports."""


class MissingMMEngineError(MmfsdpError, ImportError):
    """MMEngine or its cv2 is not installed, or MMEngine is too old, or two distributions of it are installed."""


def check_mmengine() -> None:
    """Raise unless exactly one usable MMEngine is installed. Not collective; every process checks when it imports us.

    Raises:
        MissingMMEngineError: The message says what to type.
    """
    found: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not found and importlib.util.find_spec("mmengine") is not None:
        return  # a clone of its repository
    if (problem := problem_of(found)) is not None:
        raise MissingMMEngineError(problem)
    if importlib.util.find_spec("cv2") is None:
        raise MissingMMEngineError(
            f"{' and '.join(found)} imports cv2, which is not installed: pip install opencv-python, or, on a machine "
            "without a display, opencv-python-headless."
        )


def problem_of(found: Mapping[str, str]) -> str | None:
    """Return the fault of the installed distributions of MMEngine with the command that repairs it, or None.

    Args:
        found: Their versions by name.
    """
    lowest = ".".join(map(str, MINIMUM_MMENGINE))
    if not found:
        lines = " or ".join(pip_install(f"mmfsdp-mmengine[{extra}]") for extra in DISTRIBUTIONS.values())
        return (
            f"mmfsdp_mmengine needs MMEngine {lowest} or newer, which is not installed. Install one of its "
            f"distributions: {lines}."
        )
    listed = " and ".join(f"{name} {found[name]}" for name in found)
    if len({*found.values()}) > 1:
        newest = max(found, key=lambda name: _numbers(found[name]))
        return (
            f"{listed} are installed over each other: both bring the module 'mmengine', which now mixes their files. "
            f"Keep one: pip uninstall -y {' '.join(found)} && pip install {newest}"
        )
    if _numbers(next(iter(found.values()))) < MINIMUM_MMENGINE:
        name = next(iter(found))
        return f"mmfsdp_mmengine needs MMEngine {lowest} or newer, but {listed} is installed: pip install -U {name}"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
