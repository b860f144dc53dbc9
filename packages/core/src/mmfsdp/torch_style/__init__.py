"""For users of FSDP1: its argument names of every version, and the wrapper class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.lazy import lazy
from mmfsdp.basics.torch_version import require_torch

if TYPE_CHECKING:
    from mmfsdp.torch_style.arguments import ARGUMENTS, Translated, translate_arguments

require_torch(__name__)

__all__ = [
    "ARGUMENTS",
    "Translated",
    "translate_arguments",
]

_WHERE = {
    **dict.fromkeys(("ARGUMENTS", "Translated", "translate_arguments"), "mmfsdp.torch_style.arguments"),
}

if not TYPE_CHECKING:  # a type checker reports names that are not there
    __getattr__, __dir__ = lazy(__name__, __all__, _WHERE)
