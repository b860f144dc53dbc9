"""Checkpoints on disk: read the layout of any format, convert between formats; none of it imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmfsdp.checkpoint.catalogue import FormatInfo, known_formats
    from mmfsdp.checkpoint.choosing.model_layout import layout_of_model
    from mmfsdp.checkpoint.choosing.parts import find_tensor
    from mmfsdp.checkpoint.choosing.ranks import Ranks
    from mmfsdp.checkpoint.comparing import ValueDifference
    from mmfsdp.checkpoint.converting import ConversionReport, convert
    from mmfsdp.checkpoint.copying.atomic import TargetExistsError
    from mmfsdp.checkpoint.detect import open_layout
    from mmfsdp.checkpoint.differing import Difference, DiffReport, diff
    from mmfsdp.checkpoint.keeping import latest_checkpoint, remove_old_checkpoints
    from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry
    from mmfsdp.checkpoint.statistics import TensorStatistics, tensor_statistics
    from mmfsdp.checkpoint.summarising import TreeNode, tensor_tree
    from mmfsdp.checkpoint.verifying import Problem, VerifyReport, verify

__all__ = [
    "Chunk",
    "ConversionReport",
    "DiffReport",
    "Difference",
    "FormatInfo",
    "Layout",
    "Problem",
    "Ranks",
    "TargetExistsError",
    "TensorEntry",
    "TensorStatistics",
    "TreeNode",
    "ValueDifference",
    "VerifyReport",
    "convert",
    "diff",
    "find_tensor",
    "known_formats",
    "latest_checkpoint",
    "layout_of_model",
    "open_layout",
    "remove_old_checkpoints",
    "tensor_statistics",
    "tensor_tree",
    "verify",
]

_MODULES = {
    "Chunk": "layout",
    "ConversionReport": "converting",
    "DiffReport": "differing",
    "Difference": "differing",
    "FormatInfo": "catalogue",
    "Layout": "layout",
    "Problem": "verifying",
    "Ranks": "choosing.ranks",
    "TargetExistsError": "copying.atomic",
    "TensorEntry": "layout",
    "TensorStatistics": "statistics",
    "TreeNode": "summarising",
    "ValueDifference": "comparing",
    "VerifyReport": "verifying",
    "convert": "converting",
    "diff": "differing",
    "find_tensor": "choosing.parts",
    "known_formats": "catalogue",
    "latest_checkpoint": "keeping",
    "layout_of_model": "choosing.model_layout",
    "open_layout": "detect",
    "remove_old_checkpoints": "keeping",
    "tensor_statistics": "statistics",
    "tensor_tree": "summarising",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
