"""Checkpoints on disk: read the layout of any format, convert between formats; none of it imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmfsdp.checkpoint.atomic import TargetExistsError
    from mmfsdp.checkpoint.comparing import ValueDifference
    from mmfsdp.checkpoint.converting import ConversionReport, convert
    from mmfsdp.checkpoint.detect import open_layout
    from mmfsdp.checkpoint.differing import Difference, DiffReport, diff
    from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry
    from mmfsdp.checkpoint.verifying import Problem, VerifyReport, verify

__all__ = [
    "Chunk",
    "ConversionReport",
    "DiffReport",
    "Difference",
    "Layout",
    "Problem",
    "TargetExistsError",
    "TensorEntry",
    "ValueDifference",
    "VerifyReport",
    "convert",
    "diff",
    "open_layout",
    "verify",
]

_MODULES = {
    "Chunk": "layout",
    "ConversionReport": "converting",
    "DiffReport": "differing",
    "Difference": "differing",
    "Layout": "layout",
    "Problem": "verifying",
    "TargetExistsError": "atomic",
    "TensorEntry": "layout",
    "ValueDifference": "comparing",
    "VerifyReport": "verifying",
    "convert": "converting",
    "diff": "differing",
    "open_layout": "detect",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
