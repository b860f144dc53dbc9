"""Says what to install when a config needs a module that cannot be found, or that does not fit the others."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

__all__ = ["shipped_config", "to_install", "what_to_install"]

# What OpenMMLab's packages are called on PyPI, by the name that is imported, which is their scope, too. mmcv itself has
# to be compiled; mmdet and mmsegmentation refuse 2.2.
_OPENMMLAB = {
    **{name: name for name in ("mmdet", "mmdet3d", "mmocr", "mmpose", "mmpretrain", "mmrotate", "mmyolo")},
    "mmaction": "mmaction2",
    "mmcv": "'mmcv-lite<2.2'",
    "mmseg": "mmsegmentation",
}
_COMPILED = "https://mmcv.readthedocs.io/en/latest/get_started/installation.html"
_MISSING = re.compile(r"No module named '([\w.]+)'|^(\w+) is not installed", re.MULTILINE)


def to_install(name: str) -> str | None:
    """Return the command that installs one of OpenMMLab's packages; ``None`` if it is another one, or installed.

    Args:
        name: The name that is imported, or a scope of registries, which is the same.
    """
    if name not in _OPENMMLAB or find_spec(name) is not None:
        return None
    return f"pip install {_OPENMMLAB[name]}"


def shipped_config(name: str) -> str | None:
    """Return how a config names the base of that file name which an installed package of OpenMMLab brings, or ``None``.

    Args:
        name: The name of a config file, such as ``'deit-small_4xb256_in1k.py'``.
    """
    for package in _OPENMMLAB:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / ".mim" / "configs"
            if (found := next(folder.rglob(name), None)) is not None:
                return f"{package}::{found.relative_to(folder)}"
    return None


def what_to_install(error: BaseException) -> str:
    """Return a sentence on what to do about a module that could not be imported; empty for other errors.

    Args:
        error: What reading a config or importing a module raised. MMEngine's own errors name the module in their text.
    """
    if "operator torchvision::" in str(error):
        return (
            f"The installed torchvision is of another release or build than torch {torch.__version__}, so its "
            f"operators do not load. Install both together: {_with_torchvision('--force-reinstall ')}"
        )
    found = _MISSING.search(str(error))
    if found is None:
        return ""
    module = found[1] or found[2]
    if module == "mmcv._ext":
        return (
            "The installed mmcv has no compiled operations: it is mmcv-lite, or was built without them. Install mmcv "
            f"as {_COMPILED} says."
        )
    package = module.partition(".")[0]
    if package == "pkg_resources":
        return (
            "MMEngine looks for other packages with pkg_resources, which setuptools 81 and later do not have. "
            "Install an older one with: pip install 'setuptools<81'"
        )
    if package == "torchvision":
        return f"Install the one that belongs to the installed torch: {_with_torchvision()}"
    if (command := to_install(package)) is not None:
        compiled = f". For its compiled operations, install mmcv as {_COMPILED} says."
        return f"Install it with: {command}{compiled if package == 'mmcv' else ''}"
    return "Install the package that it belongs to, or correct its name."


def _with_torchvision(option: str = "") -> str:
    """Return the command that installs torchvision and leaves torch's release as it is."""
    release, _, build = torch.__version__.partition("+")
    index = f" (with the --index-url of the build {build!r})" if build else ""
    return f"pip install {option}torch=={release} torchvision{index}"
