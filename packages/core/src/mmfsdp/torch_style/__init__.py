"""For users of FSDP1: its argument names of every version, and the wrapper class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    return lazy(__name__, __all__, _WHERE, name)
