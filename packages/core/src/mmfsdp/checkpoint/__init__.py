"""Checkpoints on disk: read the layout of any format, convert between formats; none of it imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmfsdp.checkpoint.conversion.converting import ConversionReport, convert
    from mmfsdp.checkpoint.conversion.model_layout import layout_of_model
    from mmfsdp.checkpoint.conversion.parts import find_tensor
    from mmfsdp.checkpoint.conversion.ranks import Ranks
    from mmfsdp.checkpoint.conversion.settings import Conversion
    from mmfsdp.checkpoint.files.atomic import TargetExistsError
    from mmfsdp.checkpoint.formats.catalogue import FormatInfo, known_formats
    from mmfsdp.checkpoint.formats.detect import open_layout
    from mmfsdp.checkpoint.inspection.comparing import ValueDifference
    from mmfsdp.checkpoint.inspection.differing import Difference, DiffReport, diff
    from mmfsdp.checkpoint.inspection.statistics import TensorStatistics, tensor_statistics
    from mmfsdp.checkpoint.inspection.summarising import TreeNode, tensor_tree
    from mmfsdp.checkpoint.inspection.verifying import Problem, VerifyReport, verify
    from mmfsdp.checkpoint.keeping import latest_checkpoint, remove_old_checkpoints
    from mmfsdp.checkpoint.layout import Chunk, Layout, TensorEntry

__all__ = [
    "Chunk",
    "Conversion",
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
    "Conversion": "conversion.settings",
    "ConversionReport": "conversion.converting",
    "DiffReport": "inspection.differing",
    "Difference": "inspection.differing",
    "FormatInfo": "formats.catalogue",
    "Layout": "layout",
    "Problem": "inspection.verifying",
    "Ranks": "conversion.ranks",
    "TargetExistsError": "files.atomic",
    "TensorEntry": "layout",
    "TensorStatistics": "inspection.statistics",
    "TreeNode": "inspection.summarising",
    "ValueDifference": "inspection.comparing",
    "VerifyReport": "inspection.verifying",
    "convert": "conversion.converting",
    "diff": "inspection.differing",
    "find_tensor": "conversion.parts",
    "known_formats": "formats.catalogue",
    "latest_checkpoint": "keeping",
    "layout_of_model": "conversion.model_layout",
    "open_layout": "formats.detect",
    "remove_old_checkpoints": "keeping",
    "tensor_statistics": "inspection.statistics",
    "tensor_tree": "inspection.summarising",
    "verify": "inspection.verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
