"""Says what to install when a config needs a module that cannot be found."""

from __future__ import annotations

import re
from importlib.util import find_spec

__all__ = ["to_install", "what_to_install"]

# What OpenMMLab's packages are called on PyPI, by the name that is imported, which is their scope, too.
_OPENMMLAB = {
    **{name: name for name in ("mmcv", "mmdet", "mmdet3d", "mmocr", "mmpose", "mmpretrain", "mmrotate", "mmyolo")},
    "mmaction": "mmaction2",
    "mmseg": "mmsegmentation",
}
_MISSING = re.compile(r"No module named '([\w.]+)'|^(\w+) is not installed", re.MULTILINE)


def to_install(name: str) -> str | None:
    """Return the command that installs one of OpenMMLab's packages; ``None`` if it is another one, or installed.

    Args:
        name: The name that is imported, or a scope of registries, which is the same.
    """
    if name not in _OPENMMLAB or find_spec(name) is not None:
        return None
    return f"pip install {_OPENMMLAB[name]}"


def what_to_install(error: BaseException) -> str:
    """Return a sentence on what to do about a module that could not be imported; empty for other errors.

    Args:
        error: What reading a config or importing a module raised. MMEngine's own errors name the module in their text.
    """
    found = _MISSING.search(str(error))
    if found is None:
        return ""
    module = found[1] or found[2]
    if module == "mmcv._ext":
        return (
            "The installed mmcv has no compiled operations: it is mmcv-lite, or was built without them. Install it as "
            "https://mmcv.readthedocs.io/en/latest/get_started/installation.html says."
        )
    package = module.partition(".")[0]
    if package == "pkg_resources":
        return (
            "MMEngine looks for other packages with pkg_resources, which setuptools 81 and later do not have. "
            "Install an older one with: pip install 'setuptools<81'"
        )
    if (command := to_install(package)) is not None:
        return f"Install it with: {command}"
    return "Install the package that it belongs to, or correct its name."
